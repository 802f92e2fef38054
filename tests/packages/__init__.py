"""Optimizers that people install, each trained by plain DDP and attached, bit for bit: `python -m tests.packages`.

`optimizers.txt` names packages with pinned versions, and configurations of their optimizers. `listed` reads it,
`installed` gets the packages, `ranks` trains and judges one configuration, `campaign` runs many, `report` sums up.
"""
