"""A failure is reported once, and failures of one cause as one."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from tests.pytest_project import Project

KEEPS = """
    import net

    @pytest.mark.gpumem
    @pytest.mark.parametrize("kib", [1, 2, 4])
    def test_a(kib):
        net.run(kib)

    @pytest.mark.gpumem
    def test_b():
        net.run(8)

    @pytest.mark.gpumem(max="5KB")
    def test_other():
        torch.zeros(2048, device="cuda")

    def test_plain():
        assert 1 == 2
"""
NET = """
    def run(kib):
        first = torch.zeros(kib * 256, device="cuda")
        second = torch.{}(first)
"""


def prepare(project: Project) -> None:
    project.write(net=NET.format("zeros_like"), test_keeps=KEEPS)
    project.run("--gpumem-update-baselines")
    project.write(net=NET.format("zeros_like") + "        third = torch.exp(second)\n")


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["one process", "a worker"])
def test_failures_of_one_cause_become_one(project: Project, workers: tuple[str, ...]) -> None:
    prepare(project)

    result = project.run_apart(*workers, f"--junitxml={project.path / 'junit.xml'}")

    result.assert_outcomes(failed=6)
    lines = result.outlines
    assert sum(line.startswith("the test peaked at") for line in lines) == 2
    assert "the same 1 line in 3 more tests, 1.0 KiB to 8.0 KiB over: " in " ".join(lines)
    result.stdout.fnmatch_lines(
        [
            "the same 1 line in 3 more tests, 1.0 KiB to 8.0 KiB over: test_keeps.py::test_a (2) "
            "and test_keeps.py::test_b",
            "the test peaked at 8.0 KiB (8,192 B), 3.1 KiB over its limit of 4.9 KiB (5,000 B) *",
            "accept all 4: *",
            "FAILED test_keeps.py::test_a[[]1] - +1.0 KiB over baseline",
            "FAILED test_keeps.py::test_other - +3.1 KiB over 4.9 KiB",
            "FAILED test_keeps.py::test_plain - assert 1 == 2",
            "FAILED 3 more like test_a[[]1] - 1.0 KiB to 8.0 KiB over",
        ]
    )
    assert not [line for line in lines if line.startswith("FAIL ")]
    # Files for machines hold every failure in full.
    cases = ElementTree.parse(project.path / "junit.xml").iter("failure")
    assert sum("over its baseline" in (case.text or "") for case in cases) == 4


def test_a_very_verbose_run_reports_every_failure(project: Project) -> None:
    prepare(project)
    result = project.run("-vv")
    assert sum(line.startswith("the test peaked at") for line in result.outlines) == 5
    result.stdout.no_fnmatch_line("the same * more test*")


def test_a_verbose_run_names_every_test_of_a_cause_with_its_number(project: Project) -> None:
    prepare(project)
    result = project.run("-v")
    result.stdout.fnmatch_lines(
        [
            "the same 1 line in 3 more tests, 1.0 KiB to 8.0 KiB over:",
            "  test_keeps.py::test_a[[]2]  +2.0 KiB over baseline",
            "  test_keeps.py::test_a[[]4]  +4.0 KiB over baseline",
            "  test_keeps.py::test_b  +8.0 KiB over baseline",
        ]
    )


def test_a_failure_has_the_location_of_its_test(project: Project) -> None:
    """Programs that read pytest's reports, and ``--tb=line``, show that location."""
    body = """
        @pytest.mark.gpumem(max="1KB")
        def test_large():
            torch.empty(1024, device="cuda")

        def test_of_the_user():
            pytest.fail("a sentence", pytrace=False)
    """
    project.write(test_places=body)

    lines = project.run("--tb=line").outlines

    places = [line.partition("test_places.py:") for line in lines if line.startswith("/")]
    assert [place for *_, place in places] == ["4: +3.0 KiB over 1000 B", "9: Failed: a sentence"]


def test_the_section_shows_failures_where_pytest_shows_none(project: Project) -> None:
    prepare(project)
    result = project.run("--tb=no")
    told = [line for line in result.outlines if line.startswith("FAIL ")]
    assert told == [
        *(f"FAIL test_keeps.py::test_a[{kib}]" for kib in (1, 2, 4)),
        "FAIL test_keeps.py::test_b",
        "FAIL test_keeps.py::test_other",
    ]


def test_a_damaged_file_is_reported_once_for_all_its_tests(project: Project) -> None:
    prepare(project)
    (path,) = (project.path / "baselines").rglob("*.json")
    path.write_text("<<<<<<< ours\n{}\n=======\n{}\n>>>>>>> theirs\n")

    result = project.run()

    result.assert_outcomes(failed=6)
    said = [line for line in result.outlines if "conflict markers of a merge in line 1" in line]
    # In FAILURES; the short summary may not have room for that much of it.
    assert 1 <= len(said) <= 2
    result.stdout.fnmatch_lines(["the same in 4 more tests: test_keeps.py::test_a (2), *"])
    result.stdout.no_fnmatch_line("*During handling*")
    result.stdout.no_fnmatch_line("*Traceback*")

    update = project.run("--gpumem-update-baselines")
    text = " ".join(" ".join(update.outlines).split())
    file = path.relative_to(project.path)
    assert "baselines: nothing recorded; 1 error, so the exit status is not 0 " in text
    assert (
        f"4 tests of test_keeps.py not recorded: baseline {file} has the conflict markers of a "
        "merge in line 1"
    ) in text
    assert path.read_text().startswith("<<<<<<< ours")


def test_reports_contain_a_limit_as_it_was_written(project: Project) -> None:
    prepare(project)
    record = project.report()["test_keeps.py::test_other"]
    (verdict,) = [verdict for verdict in record["verdicts"] if verdict["kind"] == "limit"]
    assert (verdict["limit"], verdict["written"]) == (5000, "5KB")
    assert json.loads(json.dumps(record["expectation"]))["max"] == 5000
