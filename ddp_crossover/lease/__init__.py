"""A lease on a GPU that the processes of one host hold in turn, so that one job computes while another communicates.

The package is independent of DDP. Its modules import each other relatively, and otherwise only the standard library,
because the broker loads the package without its parent, whose import of torch would take seconds and hundreds of
megabytes. The client uses torch only when called, to find the current CUDA device and to drain a stream. Two modules
are imported only on demand: ``instrument``, which needs torch, and ``top``, which needs rich.
"""
