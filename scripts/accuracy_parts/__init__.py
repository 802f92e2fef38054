"""The parts of `accuracy.py`: wires, tasks, the command line, what each rank does, figures, table, picture."""
