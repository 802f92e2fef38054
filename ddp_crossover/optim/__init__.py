"""Optimizers: which updates can be deferred, and how deferred updates are applied."""
