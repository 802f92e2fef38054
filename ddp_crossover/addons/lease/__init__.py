"""A lease on a GPU that the processes of one host hold in turn, so that one job computes while another communicates.

The package is independent of DDP. ``client`` is what a job uses, ``broker`` decides whose turn it is, and the modules
beside them are what both share: messages, the state page and the directory in which they meet.

All modules import each other relatively, and otherwise only the standard library, because the broker loads ``lease``
as a top-level package: importing ``ddp_crossover`` would load torch, which takes seconds and hundreds of megabytes. The
client uses torch only when called, to find the current CUDA device and to drain a stream. Two modules are imported only
on demand: ``client.instrument``, which needs torch, and ``top``, which needs rich.
"""
