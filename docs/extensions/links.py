"""Links that work both on a code host and in the built pages.

On a code host README.md lies above docs/; here it is a page of its own, and so are a few more. Links between
files are rewritten accordingly.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

__all__ = ["relinked", "setup"]

HOME = Path(__file__).resolve().parents[2]
DOCS = HOME / "docs"
# Files outside docs/ that a page includes, and the page.
PAGES = {
    HOME / "README.md": DOCS / "index.md",
    HOME / "CHANGELOG.md": DOCS / "changelog.md",
    HOME / "CONTRIBUTING.md": DOCS / "contributing.md",
    HOME / "r/preamp/README.md": DOCS / "r.md",
}
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+\.md)(?P<anchor>#[^)\s]*)?\)")


def relinked(text: str, written_in: Path, page: Path) -> str:
    """Return Markdown with links from where it was written turned into links between pages.

    Args:
        text: the Markdown.
        written_in: the file it is in.
        page: the page it becomes part of.
    """

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(written_in.parent / found["path"]))
        path = os.path.relpath(PAGES.get(target, target), page.parent)
        return f"]({path}{found['anchor'] or ''})"

    return LINK.sub(link, text)


def _of_page(app: Sphinx, docname: str, source: list[str]) -> None:
    page = DOCS / f"{docname}.md"
    source[0] = relinked(source[0], page, page)


def _of_included(app: Sphinx, included: Path, docname: str, source: list[str]) -> None:
    source[0] = relinked(source[0], Path(os.path.normpath(DOCS / included)), DOCS / f"{docname}.md")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _of_page)
    app.connect("include-read", _of_included)
    return {"parallel_read_safe": True}
