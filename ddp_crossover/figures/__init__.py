"""What users are shown of a state: figures of steps, and a state in words."""
