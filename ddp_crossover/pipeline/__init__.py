"""The memory of fusion groups, the order of their legs, and which updates wait for a gather leg."""
