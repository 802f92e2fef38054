"""DDP's side of the hook: its buckets and forwards, what is refused, and checks that ranks agree."""
