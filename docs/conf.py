"""How Sphinx builds the documentation. `make docs` does, and takes warnings for errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import preamp
from preamp.load_order import before_tensorflow

before_tensorflow()  # the API reference loads every room

project = "preamp"
author = "The preamp developers"
release = preamp.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "extensions.api",
    "extensions.drawn",
    "extensions.links",
    "extensions.layers",
    "extensions.tables",
]
exclude_patterns = ["extensions"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Where": "Where"}
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # a field stands in its class's list only
default_role = "py:obj"  # what stands between backticks in docstrings
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

smartquotes_action = "D"  # dashes alone; quotation marks stay as they are written
highlight_language = "none"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "preamp"
html_static_path = ["_static"]
html_css_files = ["preamp.css"]
html_show_copyright = False
html_show_sourcelink = False
