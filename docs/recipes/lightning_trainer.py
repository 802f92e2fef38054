"""Placeholder: the complete script takes its place."""
