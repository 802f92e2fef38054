"""The parts of `pytorch_ddp_tests.py`."""
