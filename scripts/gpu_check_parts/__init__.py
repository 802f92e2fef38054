"""The parts of `gpu_check.py`: cases, the checks they run, the ranks they run on, the report."""
