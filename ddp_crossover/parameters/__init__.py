"""Parameters and gradients that are not there yet, and what brings them up to date when somebody looks."""
