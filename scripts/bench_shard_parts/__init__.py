"""The parts of `bench_shard.py`: its command line, ratios of times, the memory of ranks, tables."""
