"""A lease on a GPU that processes of one host pass around, so that one job computes while another communicates.

The package knows nothing of DDP. Its modules import each other relatively, and beside that only the standard library
(the client reaches for torch when there is a CUDA stream to drain): the broker loads it without its parent package,
whose import of torch would take seconds and hundreds of megabytes. Two modules are loaded by those who ask for them
only: ``instrument`` needs torch, ``top`` needs rich.
"""
