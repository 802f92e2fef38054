"""Reduce-scatter and all-gather legs over gloo and NCCL."""
