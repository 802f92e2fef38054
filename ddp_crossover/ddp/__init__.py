"""Everything specific to DistributedDataParallel: buckets, forwards, refused setups, checks that ranks agree."""
