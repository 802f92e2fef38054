"""The parts of `bench_handoff.py`: its client programs, and what is measured with them."""
