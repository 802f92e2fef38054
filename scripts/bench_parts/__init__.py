"""The parts of `bench.py`: workloads, arms, the ranks' program, figures, table and chart."""
