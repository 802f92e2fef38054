"""What a run is seen by: clocks of legs and waits, traces, figures of steps."""
