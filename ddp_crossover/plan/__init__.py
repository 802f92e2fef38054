"""Plans which gradients travel together, and when, from measurements, a simulator and trials."""
