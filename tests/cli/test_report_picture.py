"""``gpumem report --to png``: pictures of a report, or why there is none."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.report.json_report import write_report
from pytest_gpumem.report.record import TestRecord
from tests.report.example_run import MIB, failing, measured, passing, phase, record

LINE = {
    "events": 3,
    "positions": [0, 1, 2, 3],
    "categories": {"parameters": [MIB] * 4, "activations": [0, MIB, 4 * MIB, 0]},
    "places": ["model.py:7 torch.mm"],
    "blocks": [[-1, 0], [0, MIB], [0, 3 * MIB], [0, -4 * MIB]],
    "phases": [["call", 0, 3], ["forward", 0, 2]],
}


def drawn() -> TestRecord:
    drawn_test = measured(
        5 * MIB,
        replace(phase("forward", 5 * MIB), composition={"activations": 5 * MIB}),
        composition={"parameters": MIB, "activations": 4 * MIB},
    )
    return record("test_a.py::test_$x$_and_<y>", replace(drawn_test, timeline=LINE))


def plot(tmp_path: Path, *arguments: str, name: str = "picture.svg") -> int:
    report = write_report(tmp_path / "report.json", [drawn(), failing(), passing()])
    return main(["report", str(report), "-o", str(tmp_path / name), *arguments])


def texts(path: Path) -> str:
    """Return the texts of an SVG; matplotlib draws letters and has the texts in comments."""
    return "\n".join(re.findall(r"<!-- (.*) -->", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", ["composition", "phases", "timeline"])
def test_every_kind_of_picture_is_drawn_with_its_units(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    assert plot(tmp_path, "--kind", kind, "--test", "test_$x$") == 0
    said = texts(tmp_path / "picture.svg")
    assert "activations" in said
    assert "5.0 MiB" in said
    assert "[simulated A100-40GB]" in said


def test_the_peaks_of_all_tests_are_drawn_by_default(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot(tmp_path, name="new/picture.png") == 0
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--test", "nowhere"], "holds no measured test whose id contains 'nowhere'"),
        (["--kind", "phases"], "3 tests are meant, test_a.py::test_$x$_and_<y> first, and this"),
        (
            ["--kind", "timeline", "--test", "test_step"],
            "test_step has no time line; run it with --gpumem-report html:PATH",
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert plot(tmp_path, *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "picture.svg").exists()


def test_history_marks_steps_and_names_their_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # A step of 16 MiB, one down by 8 MiB, and two of 1 MiB, which are within 1% + 1MiB.
    for number, peak in enumerate((64, 80, 72, 73, 74)):
        write_report(
            tmp_path / "reports" / f"run-{number}.json",
            [record("test_a.py::test_$x$", measured(peak * MIB))]
            + [record("test_b.py::test_y", measured(MIB))] * (number > 1),
        )
    picture = tmp_path / "history.svg"
    assert main(["report", str(tmp_path / "reports"), "--kind", "history", "-o", str(picture)]) == 0
    said = texts(picture).splitlines()
    for expected in (
        *("test_a.py::test_$x$", "+16.0 MiB run-1", "-8.0 MiB run-2", "64.0 MiB", "80.0 MiB"),
        "74.0 MiB, +10.0 MiB (+15.6 %) since the first",
        *("test_b.py::test_y", "1.0 MiB, as at first", "grew within 1% + 1MiB", "run-4"),
    ):
        assert expected in said
    assert "Peak over time [sim-A100-40GB-torch2.13]" in said


def test_history_draws_the_tests_that_changed_most(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number in range(2):
        write_report(
            tmp_path / "reports" / f"run-{number}.json",
            [record(f"test_{i:02}", measured((64 + number * i) * MIB)) for i in range(12)],
        )
    picture = tmp_path / "history.svg"
    assert main(["report", str(tmp_path / "reports"), "--kind", "history", "-o", str(picture)]) == 0
    said = texts(picture)
    assert "the 8 of 12 tests that changed most" in said
    assert "test_11" in said
    assert "test_03" not in said


def test_several_reports_are_accepted_only_for_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(tmp_path, "--git", "HEAD") == 2
    assert "--kind composition is of one report" in capsys.readouterr().err


def test_another_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot(tmp_path, name="picture.gif") == 2
    assert (
        "picture.gif: its name does not say what to write; add --to with one of html"
        in capsys.readouterr().err
    )


def test_missing_matplotlib_is_reported_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot(tmp_path) == 2
    assert capsys.readouterr().err == (
        "gpumem: pictures are drawn by matplotlib, which is not installed: "
        "pip install 'pytest-gpumem[plot]'\n"
    )
