"""Sphinx settings. CONTRIBUTING.md says how to build the site."""

import ddp_crossover

project = "ddp_crossover"
author = "the ddp_crossover authors"
copyright = author
version = release = ddp_crossover.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"ddp_crossover {release}"
copybutton_prompt_text = "$ "

myst_heading_anchors = 3  # links such as lease.md#parts, as on GitHub
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
# Integrations import these; pages look the same whether they are installed or not.
_FRAMEWORKS = ("lightning", "transformers", "accelerate")
autodoc_mock_imports = list(_FRAMEWORKS)
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# A signature shows its defaults as they are written, not as the values that they have here.
autodoc_preserve_defaults = True

# Every reference must be found. Those to other projects are left as text, so that a build needs no network.
nitpicky = True
_OTHERS = ("torch", "numpy", *_FRAMEWORKS, "collections", "contextlib", "os", "typing", "pathlib")
nitpick_ignore_regex = [
    ("py:.*", rf"({'|'.join(_OTHERS)})\b.*"),
    # What attach(sync=...) takes and returns, for type checkers.
    ("py:.*", r"ddp_crossover\.attaching\.(State|StateArguments|SyncPolicy)$"),
    # The options once more, for type checkers, and what a string becomes.
    ("py:.*", r"(ddp_crossover\.options\.)?(GivenOptions|Norms)$"),
    # Aliases of torch's classes, see ddp_crossover/device.py.
    ("py:.*", r"(gpu\.)?(Stream|Event|Moment)$"),
]
