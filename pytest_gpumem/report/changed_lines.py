"""The lines that a pull request changes, by git: annotations are visible on these."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pytest_gpumem.git import GitError, git, toplevel

_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")

Lines = Mapping[str, set[int]]
"""Line numbers by path, relative to the top of the repository."""
Changed = tuple[Path, Lines]
"""The top of the repository, and its changed lines."""


def changed_lines(root: Path) -> Changed | None:
    """Return the top of the repository of ``root``, and the lines that differ from the base branch.

    ``None`` outside a pull request of GitHub's, and where the base branch is not there: a checkout
    of depth 1 does not have it.
    """
    base = os.getenv("GITHUB_BASE_REF")
    if not base:
        return None
    try:
        top = toplevel(root)
        # From the merge base: later commits of the base branch are not changes of this one.
        diff = git(root, "diff", "--unified=0", "--no-color", f"origin/{base}...HEAD")
    except GitError:
        return None
    return top, _lines_of(diff.decode(errors="replace"))


def _lines_of(diff: str) -> Lines:
    found: defaultdict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := _HUNK.match(line):
            begin, count = int(hunk[1]), int(hunk[2] or 1)
            found[path].update(range(begin, begin + count))
    return found
