"""Which gradients travel together, and when: measured, simulated, tried."""
