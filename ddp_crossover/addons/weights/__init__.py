"""Batches of different sizes, ``weighted=True``, and shares of a batch by how fast ranks compute."""
