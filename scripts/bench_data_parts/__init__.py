"""The parts of `bench_data.py`: pictures, the arms, and the ranks that load."""
