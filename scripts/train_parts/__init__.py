"""The parts of `train.py` beside the training loop: options, data, checkpoints, display, the record."""
