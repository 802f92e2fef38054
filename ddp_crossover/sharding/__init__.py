"""Sharded optimizers: each rank updates its shards between the scatter and the gather legs, which carry parameters."""
