"""``examples/ranks``: a wrong wrapping policy fails as its README shows."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.docs.release import NAMED_RELEASE, is_named_release
from tests.forked import REPOSITORY, quick

README = (REPOSITORY / "examples/ranks/README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(
    not is_named_release(), reason=f"the README shows numbers of torch {NAMED_RELEASE}"
)
def test_a_wrong_wrapping_policy_fails_as_in_the_readme() -> None:
    ran = subprocess.run(
        [
            *(quick(), "-m", "pytest", "-p", "no:cacheprovider", "--gpumem-device=sim"),
            "examples/ranks/test_ranks.py::test_step",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "EXAMPLE_REGRESSION": "1", "COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = re.findall(
        r"^    ((?:unsharded|the test peaked|forward: ).*|  [+-] ?\d.*)$", README, re.MULTILINE
    )
    printed = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert ran.returncode == 1, ran.stdout
    assert len(shown) == 7
    for line in shown:
        assert any(found.startswith(" ".join(line.split())) for found in printed), (
            line,
            ran.stdout,
        )
