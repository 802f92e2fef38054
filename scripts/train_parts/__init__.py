"""What `train.py` needs beside the training loop: data, checkpoints, timing, display."""
