"""The parts of `demo.py`: images, arms, measurements, the report."""
