"""``gpumem html REPORT``: the page of a report of an earlier run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.cli import main
from pytest_gpumem.report.html.page import render
from pytest_gpumem.report.json_report import write_report
from tests.report.example_run import failing, passing


def test_the_page_is_that_of_the_run_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = write_report(tmp_path / "report.json", [failing(), passing()])
    assert main(["html", str(report)]) == 0
    page = tmp_path / "report.html"
    assert page.read_text(encoding="utf-8") == render([failing(), passing()])
    size = page.stat().st_size / 1024
    assert capsys.readouterr().out == f"{page}: 2 tests, {size:.1f} KiB\n"


def test_the_page_may_stand_elsewhere(tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", [passing()])
    assert main(["html", str(report), "-o", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()
    assert not (tmp_path / "report.html").exists()


def test_a_report_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(tmp_path / "report.html", [passing()])
    before = report.read_bytes()
    assert main(["html", str(report)]) == 2
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
def test_what_is_no_report_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert main(["html", str(path)]) == 2
    assert capsys.readouterr().err == f"gpumem: {said.format(path=path)}\n"
    assert not (tmp_path / "report.html").exists()
