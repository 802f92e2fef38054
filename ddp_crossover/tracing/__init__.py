"""When things happened: clocks, spans, traces, pictures."""
