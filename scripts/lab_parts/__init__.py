"""What `scripts/lab.py` is made of: namespaces and links, and the commands that run in them."""
