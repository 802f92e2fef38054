"""The parts of `pytorch_ddp_tests.py`: running tests, attaching everywhere, doing without a GPU."""
