"""``--gpumem-report html:PATH``: a run's page, and the time lines that only the page needs."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from pytest_gpumem.sharing.database import FOLDER_VARIABLE
from tests.pytest_project import Project
from tests.report.html.parsed import Page

TESTS = """
    @pytest.mark.gpumem
    def test_two_blocks(gpumem):
        with gpumem.phase("first"):
            a = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            b = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
            del a

    @pytest.mark.gpumem(max=512)
    def test_too_much():
        torch.zeros(1024, device="cuda")
"""
MIB = 1024**2


def page_of(project: Project, *args: str, apart: bool = False) -> Page:
    run = project.run_apart if apart else project.run
    result = run("--gpumem-report=html:out/page.html", *args)
    result.assert_outcomes(passed=1, failed=1)
    return Page((project.path / "out" / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("args", [(), ("-n1",)])
def test_the_page_of_a_run_has_its_time_lines(project: Project, args: tuple[str, ...]) -> None:
    if args:
        pytest.importorskip("xdist")
    project.write(test_it=TESTS)
    page = page_of(project, *args, apart=bool(args))
    failed, passed = page.details
    assert [row["status"] for row in page.overview["tests"]] == ["failed", "new"]
    assert page.overview["causes"][0]["tests"] == [0]
    line = passed["measurement"]["timeline"]
    assert line["events"] == len(line["positions"]) - 1
    totals = [sum(at) for at in zip(*line["categories"].values(), strict=True)]
    # Where the allocator gets a segment from the driver nothing is allocated yet.
    assert [total for total, _ in groupby(totals)] == [0, MIB, 3 * MIB, 2 * MIB, 0]
    assert max(totals) == passed["measurement"]["peak_allocated"]
    # A segment of 2 MiB for the small block and one of 20 MiB for the large one.
    assert [bytes for bytes, _ in groupby(line["reserved"])][:3] == [0, 2 * MIB, 22 * MIB]
    # 1 of 2 MiB, then 18 of 20 MiB too; at last the small segment is whole again.
    splits = [bytes for bytes, _ in groupby(line["split"])]
    assert splits[:5] == [0, MIB, 19 * MIB, 18 * MIB, 0]
    assert max(line["reserved"]) == passed["measurement"]["peak_reserved"]
    assert line["places"][0].startswith("test_it.py:")
    assert line["phases"][1] == ["first", 0, 5]
    assert failed["measurement"]["timeline"]["events"] >= 1


def test_without_a_page_no_time_line_is_recorded(project: Project) -> None:
    project.write(test_it=TESTS)
    for test in project.report().values():
        assert "timeline" not in test["measurement"]


def test_a_json_report_beside_a_page_has_the_page_s_time_lines(project: Project) -> None:
    project.write(test_it=TESTS)
    report = project.report("--gpumem-report=html:page.html")
    assert report["test_it.py::test_two_blocks"]["measurement"]["timeline"]["events"] >= 3


def test_a_page_that_cannot_be_written_is_reported_and_fails_the_run(project: Project) -> None:
    project.write(test_it="@pytest.mark.gpumem\ndef test_a():\n    torch.ones(1, device='cuda')")
    (project.path / "page.html").mkdir()
    result = project.run("--gpumem-report=html:page.html")
    result.stdout.fnmatch_lines(["*page.html cannot be written: Is a directory;*html:PATH*"])
    assert result.ret != 0


@pytest.mark.parametrize("args", [(), ("-n2",)])
def test_the_page_of_a_shared_run_shows_each_test_s_memory_over_time(
    project: Project, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if args:
        pytest.importorskip("xdist")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    project.write(test_it=TESTS)
    page = page_of(project, "--gpumem-share", *args, apart=bool(args))
    (use,) = page.overview["usage"]
    assert "cuda:0" in use["device"]
    assert sorted(span["nodeid"] for span in use["spans"]) == [
        "test_it.py::test_too_much",
        "test_it.py::test_two_blocks",
    ]
    assert min(span["begin"] for span in use["spans"]) == 0
    assert all(span["begin"] <= span["end"] for span in use["spans"])
