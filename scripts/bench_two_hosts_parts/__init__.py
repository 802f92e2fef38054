"""The part of `bench_two_hosts.py`: the program that each rank runs."""
