"""How Sphinx builds the user's guide from the Markdown beside this file: ``tox -e docs``."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "pytest-gpumem"
release = version_of("pytest-gpumem")

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # so that page.md#heading is checked
smartquotes = False  # of "--all" they make a dash

html_theme = "furo"
html_title = f"pytest-gpumem {release}"
# Everything is in the theme's package: pages open from a disk and ask the network for nothing.
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Let pages name what is in the repository alone, to which a page of the site cannot link."""

    def without_links(app: Sphinx, page: str, source: list[str]) -> None:
        if "/" not in page:
            source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", source[0])

    app.connect("source-read", without_links)
