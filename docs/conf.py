"""How Sphinx makes the documentation site of these pages: `scripts/docs` runs it."""

import importlib.util
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from p3kv.common.version import VERSION

# One environment has one framework at most. autodoc reads PyTorch's optimizer beside a stand-in.
HAS_MXNET = importlib.util.find_spec("mxnet") is not None
if HAS_MXNET:
    importlib.import_module("mxnet")  # before the store's module, which autodoc imports by itself
autodoc_mock_imports = []
if importlib.util.find_spec("torch") is None:
    autodoc_mock_imports = ["torch", "p3kv.frontends.torch.values"]  # which wraps torch's functions

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

_RANGE = re.compile(r"Annotated\[(\w+), msgspec\.Meta\(ge=([\d.]+), le=([\d.]+)\)\]")
_LENGTH = re.compile(r"Annotated\[str, msgspec\.Meta\(min_length=\d+, max_length=\d+\)\]")


def _shorten(app, doctree):
    """Signatures as a user reads them: types of settings in words, and no module of the store's
    class, since `mx.kv.create` makes the store."""
    for node in list(doctree.findall(addnodes.desc_annotation)):
        words = _LENGTH.sub("str", _RANGE.sub(r"\1 from \2 to \3", node.astext()))
        if words != node.astext():
            node[:] = [nodes.Text(words)]
    for node in list(doctree.findall(addnodes.desc_addname)):
        if node.astext() == "p3kv.frontends.mxnet.store.":
            node.parent.remove(node)


def _leave_out_store(app, docname, source):
    """The store's module opens MXNet's library, for which no stand-in will do."""
    if docname == "api" and not HAS_MXNET:
        source[0] = re.sub(
            r"```{eval-rst}\n\.\. autoclass:: p3kv\.frontends\.mxnet\.store\.P3.*?```",
            "(This site was built without MXNet, which it takes to show the store's calls.)",
            source[0],
            flags=re.DOTALL,
        )


def setup(app):
    app.connect("source-read", _leave_out_store)
    app.connect("doctree-read", _shorten)
