"""Records when legs, waits and compute happened: clocks, spans, traces, pictures."""
