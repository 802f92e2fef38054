"""What belongs to DistributedDataParallel: its buckets, its forward, what it refuses, and what ranks have in common."""
