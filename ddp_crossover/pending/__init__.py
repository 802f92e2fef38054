"""Pending parameters and gradients, which are brought up to date when their values are used."""
