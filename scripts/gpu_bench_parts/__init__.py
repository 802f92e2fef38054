"""The parts of `gpu_bench.py`: the emulated wire, workloads, arms, rounds, figures, report."""
