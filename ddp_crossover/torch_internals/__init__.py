"""Every private API of torch that this package uses, each behind one small function.

Checked on torch 2.11 to 2.15. If a name is missing, the error says so here, instead of failing far away.
"""
