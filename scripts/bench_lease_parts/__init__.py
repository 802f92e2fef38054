"""What `scripts/bench_lease.py` is made of: the emulated device, jobs and who conducts them, figures, report."""
