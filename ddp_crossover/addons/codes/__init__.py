"""Gradients that travel as codes, with error feedback: ``wire_dtype=torch.int8``, ``compress=``."""
