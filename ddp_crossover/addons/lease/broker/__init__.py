"""The broker: one process per host and user that grants resources in turn. Loads without torch."""
