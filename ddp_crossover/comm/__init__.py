"""Reduce-scatter and all-gather legs between ranks, and what they need: over gloo here, over NCCL in ``nccl``."""
