"""The parts of `bench_lease.py`: the emulated device, jobs and their conductor, figures, report."""
