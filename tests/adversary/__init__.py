"""Training loops by somebody who has read the README only: each runs under plain DDP and with ddp_crossover
attached, from one seed, and everything that a script can see must have the same bits.

The files `test_withheld_*.py` hold the second half, to be run once the code is frozen.
"""
