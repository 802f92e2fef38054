"""Legs of CUDA tensors: over NCCL, by copy engines, or staged on the host for gloo; and the choice of a link."""
