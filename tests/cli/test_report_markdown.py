from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.report.record import TestRecord
from tests.cli.test_gpumem_compare import (  # noqa: F401
    A10,
    MIB,
    Gpumem,
    Refusal,
    gpumem,
    measured,
    record,
    refusal,
    report,
)
from tests.report.test_markdown import HOSTILE


def held(name: str, *sites: tuple[str, int]) -> TestRecord:
    """Return a test whose peak is held by ``sites``: lines and bytes."""
    rows = [
        Site("activations", nbytes, site=line, operator="torch.mm").to_dict()
        for line, nbytes in sites
    ]
    peak = measured(sum(nbytes for _, nbytes in sites))
    return record(name, None, measurement=replace(peak, sites=tuple(rows)))


def test_changes_since_the_base_are_shown_with_their_lines(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    report(
        tmp_path / "main.json",
        held("test_grown", ("a.py:1", 8 * MIB)),
        record("test_less", 8 * MIB),
        record("test_old", 512),
        record("test_same", 4 * MIB),
        record("test_broken", 4 * MIB),
    )
    report(
        tmp_path / "change.json",
        held("test_grown", ("a.py:1", 8 * MIB), ("b.py:2", 2 * MIB)),
        record("test_less", 6 * MIB),
        record("test_new", 3 * MIB),
        record("test_same", 4 * MIB),
        record("test_broken", 512, outcome="failed", judged=False),
    )
    code, lines = gpumem(
        "report", "--to", "markdown", "change.json", "--against", "main.json", "--base-name", "main"
    )
    assert code == 0
    assert lines == [
        "<!-- pytest-gpumem -->",
        "### GPU memory: 5 tests measured, none failed by it, 1 not judged",
        "",
        "Measured on `simulated T4 (torch 2.13)`.",
        "",
        "**Against `main`**: 1 grew, 1 fell, 1 new, 1 gone, 1 failed",
        "",
        "| test | before | now | change |",
        "| :-- | --: | --: | --: |",
        "| `test_a.py::test_grown` | 8.0 MiB | 10.0 MiB | +2.0 MiB (+25.0 %) |",
        "| `test_a.py::test_less` | 8.0 MiB | 6.0 MiB | -2.0 MiB (-25.0 %) |",
        "| `test_a.py::test_new` | - | 3.0 MiB | new |",
        "| `test_a.py::test_old` | 512 B | - | gone |",
        "| `test_a.py::test_broken` | 4.0 MiB | - | failed |",
        "",
        "`test_a.py::test_grown`",
        "```text",
        "  +2.0 MiB  activations  b.py:2  torch.mm  1 × 2.0 MiB (new)",
        "```",
    ]


def test_a_test_s_tolerance_and_earlier_name_are_used(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    report(
        tmp_path / "main.json",
        record("test_loose", 100 * MIB),
        record("test_size[1]", 3 * MIB, nodeid="test_a.py::test_size[1]"),
    )
    report(
        tmp_path / "change.json",
        record("test_loose", 104 * MIB, expectation={"tolerance": "5% + 0"}),
        record("test_size[1]", 4 * MIB, nodeid="test_b.py::test_size[1]"),
    )
    _, lines = gpumem(
        "report", "--to", "markdown", "change.json", "--against", "main.json", "--base-name", "main"
    )
    assert [line for line in lines if line.startswith(("**Against", "| `"))] == [
        "**Against `main`**: 1 grew",
        "| `test_b.py::test_size[1]` (was `test_a.py::test_size[1]`) | 3.0 MiB | 4.0 MiB | "
        "+1.0 MiB (+33.3 %) |",
    ]


def test_an_unchanged_report_is_one_sentence(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    report(tmp_path / "main.json", record("test_same", 4 * MIB))
    assert (
        "**Against `main.json`**: no peak changed."
        in (gpumem("report", "--to", "markdown", "main.json", "--against", "main.json")[1])
    )


def test_another_environment_is_not_compared(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    report(tmp_path / "a.json", record("test_x", 4 * MIB))
    report(tmp_path / "b.json", record("test_x", 8 * MIB, environment=A10))
    (line,) = [
        line
        for line in gpumem("report", "--to", "markdown", "b.json", "--against", "a.json")[1]
        if line.startswith("**Against")
    ]
    assert line == (
        "**Against `a.json`**: nothing to compare, because it was measured in another environment."
    )


def test_a_hostile_name_in_the_difference_is_escaped(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    for name, peak in (("a", MIB), ("b", 2 * MIB)):
        report(tmp_path / f"{name}.json", record("x", peak, nodeid=HOSTILE))
    _, lines = gpumem(
        "report", "--to", "markdown", "b.json", "--against", "a.json", "--base-name", "`x`|y"
    )
    (row,) = [line for line in lines if "+1.0 MiB" in line]
    assert row.count("|") == 5
    assert "**Against <code>&#96;x&#96;&#124;y</code>**: 1 grew" in lines
    assert not any("<script" in line or line.startswith("::") for line in lines)


def test_a_file_and_a_name_can_be_set(gpumem: Gpumem, tmp_path: Path) -> None:  # noqa: F811
    report(tmp_path / "a.json", record("test_x", MIB))
    assert gpumem(
        "report", "--to", "markdown", "a.json", "--name", "py 3.12", "-o", "c/comment.md"
    ) == (0, [])
    assert (tmp_path / "c/comment.md").read_text().startswith("<!-- pytest-gpumem: py-3.12 -->\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("absent.json",), "report absent.json cannot be read: No such file"),
        (("a.json", "--against", "a.txt"), "report a.txt is not one of pytest-gpumem"),
        (("a.json", "-o", "."), "report . cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_sentence(
    refusal: Refusal,  # noqa: F811
    tmp_path: Path,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    report(tmp_path / "a.json", record("test_x", MIB))
    (tmp_path / "a.txt").write_text("{}")
    assert refusal("report", "--to", "markdown", *arguments).startswith(f"gpumem: {sentence}")
