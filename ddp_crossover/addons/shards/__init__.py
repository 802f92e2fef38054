"""``shard_optimizer=True``: each rank updates its shards between scatter and gather legs, which carry parameters."""
