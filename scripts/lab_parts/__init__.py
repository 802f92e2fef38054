"""The parts of `lab.py`: namespaces and links, and the commands that run in them."""
