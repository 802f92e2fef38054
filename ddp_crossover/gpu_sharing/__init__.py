"""Decides when the training of one model holds its lease on a GPU."""
