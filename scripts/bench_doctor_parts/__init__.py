"""The parts of scripts/bench_doctor.py."""
