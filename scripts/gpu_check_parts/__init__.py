"""What `scripts/gpu_check.py` is made of: cases, the checks they run, the ranks they run on, the report."""
