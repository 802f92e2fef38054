"""What `bench.py` is made of: workloads, arms, the rank's side, and what is shown of the figures."""
