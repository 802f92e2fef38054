"""Everything that the core trains without: one folder a feature, imported by the root when its option is given.

The core imports none of these; they import the core.
"""
