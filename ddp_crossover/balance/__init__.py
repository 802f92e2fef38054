"""Shares of a batch by how fast ranks compute."""
