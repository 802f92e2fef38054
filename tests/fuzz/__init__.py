"""A fuzzer of training programs: random scripts, trained by plain DDP and by attached DDP, which must agree.

`features` is the one table of what a program can contain; a new feature of the package is one more line there, and
meets all others. `drawing` turns it into a hypothesis strategy, `training` runs a program, `events` are what happens
in its middle, `laws` say what must be equal, `ranks` compares on real ranks, `corpus/` keeps what has failed once.

    python -m tests.fuzz --seed 7 --programs 500 --ranks 2 --only shard_optimizer=true
"""
