"""The memory in which gradients travel, and how they get into it."""
