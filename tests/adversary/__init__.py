"""Training loops by somebody who has read the README only: each runs under plain DDP and with ddp_crossover
attached, from one seed, and everything that a script can see must have the same bits.
The fuzzer draws what can be put together from parts; here is what somebody had to think of.
"""
