"""Norms of gradients from the shards of all ranks, without waiting for gathers."""
