"""Sphinx configuration of the documentation site: ``make docs`` builds it with warnings as errors.

The build needs no network. Diagrams are fenced Mermaid, which GitHub renders too; a browser that cannot load
Mermaid shows their source.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from picotron_ray import __version__  # noqa: E402

project = "picotron_ray"
author = "The picotron_ray authors"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
    "generated_reference",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
smartquotes = False  # they would turn --json into a dash
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Sections that our docstrings have beyond Google's.
napoleon_custom_sections = [("Fields", "params_style")]

nitpicky = True
# Types of the standard library and of dependencies: their documentation is not fetched at build time. Types
# of our own that the API page leaves out are described by the docstring that names them.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|ray|pydantic|typing|collections|pathlib|types|nn|dist)\b.*"),
    ("py:(class|data|obj|exc)", r"[\w.]+"),
]

html_theme = "furo"
html_title = f"picotron_ray {version}"
html_static_path = ["_static"]
html_copy_source = False
