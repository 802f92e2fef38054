"""The parts of `soak.py`: the training, what is measured of its processes, the neighbours, the verdict, the table."""
