"""The parts of `sim_lease.py`: a GPU that several processes share, hosts in virtual time, jobs, cases and figures."""
