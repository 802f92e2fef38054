"""What the benches share: launching ranks and lease brokers, rounds, progress, the record, the command line."""
