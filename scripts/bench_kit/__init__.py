"""What the benches share: launching ranks and lease clients, rounds, progress, the record, the command line."""
