"""Where one model's training holds its lease on a GPU, and where it lets others have it."""
