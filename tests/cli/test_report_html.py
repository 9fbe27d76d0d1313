"""``gpumem report --to html``: the page of a report of an earlier run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.report.html.page import render
from pytest_gpumem.report.json_report import write_report
from tests.report.example_run import MIB, failing, measured, passing, record
from tests.report.html.parsed import Page

USE = {
    "device": "cuda:0",
    "capacity": 16 * MIB,
    "spans": [{"nodeid": "test_a", "worker": "gw0", "begin": 0.0, "end": 1.5, "bytes": MIB}],
}


def test_the_page_equals_that_of_the_run_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write_report(tmp_path / "report.json", [failing(), passing()])
    assert main(["report", str(report)]) == 0
    page = tmp_path / "report.html"
    assert page.read_text(encoding="utf-8") == render([failing(), passing()])
    size = page.stat().st_size / 1024
    assert capsys.readouterr().out == f"{page}: 2 tests, {size:.1f} KiB\n"


def test_the_page_may_be_written_to_another_path(tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", [passing()])
    assert main(["report", str(report), "-o", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()
    assert not (tmp_path / "report.html").exists()


def test_a_report_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(tmp_path / "report.html", [passing()])
    before = report.read_bytes()
    assert main(["report", str(report)]) == 2
    assert capsys.readouterr().err == (
        f"gpumem: the page would replace the report {report}; name another with --output\n"
    )
    assert report.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "report {path} cannot be read: No such file or directory; check the path"),
        (
            "[]",
            "report {path} is not one of pytest-gpumem: [] is not of type 'object' at $; write it "
            "with --gpumem-report json:PATH",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert capsys.readouterr().err == f"gpumem: {said.format(path=path)}\n"
    assert not (tmp_path / "report.html").exists()


def rows(page: Path) -> dict[str, dict[str, object]]:
    overview = Page(page.read_text(encoding="utf-8")).overview
    return {row["id"]: row for row in overview["tests"]}


@pytest.mark.parametrize("how", ["reports", "--history"])
def test_earlier_reports_are_the_history_of_the_last(how: str, tmp_path: Path) -> None:
    """The peaks are 16 MiB, 16.5 MiB (a small change) and 20 MiB (a step)."""
    peaks = {"run-9": 16 * MIB, "run-10": 16 * MIB + MIB // 2, "run-11": 20 * MIB}
    new = [record("test_a.py::test_new", measured(MIB))]
    reports = [
        write_report(
            tmp_path / "runs" / f"{name}.json",
            [record("test_a.py::test_a", measured(peak)), *new[at:]],
        )
        for at, (name, peak) in zip((1, 1, 0), peaks.items(), strict=True)
    ]
    page = tmp_path / "page.html"
    # The folder holds the report itself, too.
    given = [*reports] if how == "reports" else [reports[-1], "--history", tmp_path / "runs"]
    assert main(["report", *map(str, given), "-o", str(page)]) == 0
    overview = Page(page.read_text(encoding="utf-8")).overview
    assert overview["moments"] == ["run-9", "run-10", "run-11"]
    test_row = rows(page)["test_a.py::test_a"]
    assert test_row["trend"] == [[0, 16 * MIB], [1, 16 * MIB + MIB // 2], [2, 20 * MIB]]
    assert test_row["steps"] == [["run-11", 16 * MIB + MIB // 2, 20 * MIB]]
    assert test_row["crept"] == MIB // 2
    assert rows(page)["test_a.py::test_new"]["trend"] == [[2, MIB]]


def test_without_earlier_reports_there_is_no_history(tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", [passing()])
    assert main(["report", str(report)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.overview["moments"] == []
    assert "trend" not in page.overview["tests"][0]


def test_a_folder_without_reports_is_refused_as_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write_report(tmp_path / "report.json", [passing()])
    (tmp_path / "none").mkdir()
    assert main(["report", str(report), "--history", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"gpumem: {tmp_path / 'none'} holds no reports; give files of --gpumem-report json:PATH\n"
    )


def test_the_page_shows_how_tests_shared_a_device(tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", [passing()], [USE])
    assert main(["report", str(report)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.overview["usage"] == [USE]
