"""How Sphinx makes the documentation site of these pages: `scripts/docs` runs it."""

import mxnet  # noqa: F401  # before the store's module, which autodoc imports by itself

from p3kv.version import VERSION

project = "p3kv"
author = "The p3kv authors"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"p3kv {VERSION}"
html_show_copyright = False  # the licence is in the repository
exclude_patterns = ["conf.py"]

myst_heading_anchors = 3  # links to headings are checked
default_role = "code"  # docstrings write code in single backticks, as Markdown does
smartquotes = False  # they would change code in docstrings

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # what docstrings say is shorter than the types
