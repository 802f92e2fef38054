"""Optimizers: which updates can wait, and how they are made later."""
