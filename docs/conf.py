"""Sphinx's configuration: `make docs` builds docs/_build/html, and a warning is an error."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src"), str(HERE.parent)]

import moax  # noqa: E402

project = "moax"
author = "the authors of moax"
release = moax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api", "live"]
exclude_patterns = ["_build"]

# Signatures and docstrings pass _ext/api.py, and napoleon renders the sections.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_custom_sections = ["Returns"]  # may name several results
autoclass_content = "both"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False

myst_heading_anchors = 2  # a link may name a heading: page.md#a-heading
smartquotes = False  # three dots in a shape are three dots
highlight_language = "text"  # of blocks that name no language: formulas

html_theme = "furo"
html_title = "moax"
html_static_path = ["_static"]
html_css_files = ["moax.css"]
html_show_copyright = False
html_copy_source = False
