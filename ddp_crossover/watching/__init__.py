"""Which updates of an optimizer may be put off, known by watching its real steps."""
