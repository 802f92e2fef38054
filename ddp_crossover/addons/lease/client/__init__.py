"""A job's side of the lease. Loads without torch, apart from ``instrument``, which is imported only on demand."""

from .lease import GpuLease

__all__ = ["GpuLease"]
