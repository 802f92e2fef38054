"""Attaches to scripts that do not know of this package: ``dx.auto``, ``run``, ``verify``, ``doctor``."""
