"""The parts of `bench_lease.py`: cases, the emulated device, jobs and their conductor, figures."""
