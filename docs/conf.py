"""How Sphinx makes the documentation site of these pages: `scripts/docs` runs it."""

import os
import sys
from pathlib import Path

import mxnet  # noqa: F401  # before the store's module, which autodoc imports by itself

from p3kv.version import VERSION

# The commands' pages show what this environment's `p3kv COMMAND --help` says.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["COLUMNS"] = "88"

project = "p3kv"
author = "The p3kv authors"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.programoutput"]
html_theme = "furo"
html_title = f"p3kv {VERSION}"
html_show_copyright = False  # the licence is in the repository
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_use_index = html_domain_indices = False  # no page leads to them; the search finds names
exclude_patterns = ["conf.py"]

myst_heading_anchors = 3  # links to headings are checked
default_role = "code"  # docstrings write code in single backticks, as Markdown does
smartquotes = False  # they would change code in docstrings

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False  # users do not import from the modules in which classes are
