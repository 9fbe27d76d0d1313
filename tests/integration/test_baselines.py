"""Baselines in pytest runs: when they are written, pruned and compared, and what runs report."""

from __future__ import annotations

import json

import pytest

from tests.pytest_project import Project

FILE = "sim-T4-torch{}/test_sizes.py.json"

SIZES = """
    @pytest.mark.gpumem
    @pytest.mark.parametrize("name", ["small", "large"])
    def test_size(name):
        torch.empty({{"small": {small}, "large": {large}}}[name], dtype=torch.uint8, device="cuda")
"""


def write_sizes(project: Project, small: int = 512, large: int = 4096) -> None:
    project.write(test_sizes=SIZES.format(small=small, large=large))


def peaks(project: Project) -> dict[str, int]:
    """Return all stored peaks by test."""
    return {
        f"{file.partition('/')[2]}::{test}": entry["peak_allocated"]
        for file, tests in project.baselines().items()
        for test, entry in tests.items()
    }


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one process", "two workers"])
def test_update_writes_every_test_that_ran(project: Project, workers: tuple[str, ...]) -> None:
    write_sizes(project)

    result = project.run_apart("--gpumem-update-baselines", *workers)

    assert result.ret == 0
    assert peaks(project) == {
        "test_sizes.py.json::test_size[small]": 512,
        "test_sizes.py.json::test_size[large]": 4096,
    }
    (file,) = project.baselines()
    assert file.startswith("sim-T4-torch")
    assert project.run_apart("--gpumem-require-baselines", *workers).ret == 0


def test_a_report_of_the_recording_run_lists_no_test_as_without_baseline(project: Project) -> None:
    write_sizes(project)
    comment = project.path / "report.md"
    option = f"--gpumem-report=markdown:{comment}"

    project.run(option)
    assert "Without baseline" in comment.read_text()
    project.run(option, "--gpumem-update-baselines")
    assert "Without baseline" not in comment.read_text()


def test_growth_fails_with_the_command_that_accepts_it(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    write_sizes(project, large=8192)

    result = project.run()

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "the test peaked at 8.0 KiB (8,192 B), 4.0 KiB over its baseline of 4.0 KiB "
            "(+100.0 %, tolerance 0) ?simulated T4?",
            "accept it: pytest --gpumem-device=sim:T4 --gpumem-update-baselines "
            '"test_sizes.py::test_size?large?"',
        ]
    )
    assert project.run("--gpumem-update-baselines").ret == 0
    assert project.run().ret == 0


def test_a_partial_update_leaves_the_other_tests_alone(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    write_sizes(project, small=1024, large=8192)

    project.run("--gpumem-update-baselines", "test_sizes.py::test_size[small]")

    assert sorted(peaks(project).values()) == [1024, 4096]


def test_new_only_adds(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines", "-k", "small")
    write_sizes(project, small=256, large=8192)

    result = project.run("--gpumem-update-baselines=new")

    assert result.ret == 0
    assert sorted(peaks(project).values()) == [512, 8192]


def test_an_improvement_is_reported_and_passes(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    write_sizes(project, large=2048)

    result = project.run()

    assert result.ret == 0
    result.stdout.fnmatch_lines(["*2.0 KiB under its baseline of 4.0 KiB*"])


def test_tests_that_do_not_pass_are_not_recorded(project: Project) -> None:
    project.write(
        test_sizes="""
        @pytest.fixture
        def broken_teardown():
            yield
            raise RuntimeError

        @pytest.mark.gpumem
        def test_fails():
            torch.empty(1, device="cuda")
            raise RuntimeError

        @pytest.mark.gpumem(max=1)
        def test_too_large():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        @pytest.mark.xfail
        def test_xfails():
            torch.empty(1, device="cuda")
            raise RuntimeError

        @pytest.mark.gpumem
        @pytest.mark.xfail
        def test_xpasses():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        def test_error_in_teardown(broken_teardown):
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem(baseline=False)
        def test_unwanted():
            torch.empty(1, device="cuda")

        def test_unmarked(gpumem):
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        def test_passes():
            torch.empty(1, device="cuda")
        """
    )

    project.run("--gpumem-update-baselines")

    assert peaks(project) == {"test_sizes.py.json::test_passes": 512}


@pytest.mark.parametrize(
    ("marker", "args", "outcome"),
    [
        ("baseline=True", (), "failed"),
        ("", ("--gpumem-require-baselines",), "failed"),
        ("", (), "passed"),
        ("baseline=False", ("--gpumem-require-baselines",), "passed"),
    ],
)
def test_the_outcome_with_a_missing_baseline(
    project: Project, marker: str, args: tuple[str, ...], outcome: str
) -> None:
    project.write(
        test_missing=f"""
        @pytest.mark.gpumem({marker})
        def test_missing():
            torch.empty(1, device="cuda")
        """
    )

    project.run(*args).assert_outcomes(**{outcome: 1})


def test_ci_requires_no_baseline_of_a_test_that_does_not_ask_for_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    write_sizes(project)

    assert project.run().ret == 0


def test_pruning_deletes_tests_that_no_longer_exist(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    project.write(
        test_sizes="""
        @pytest.mark.gpumem
        def test_size():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        def test_other():
            torch.empty(1, device="cuda")
        """
    )

    project.run("--gpumem-update-baselines", "--gpumem-prune-baselines", "-k", "test_other")

    assert peaks(project) == {"test_sizes.py.json::test_other": 512}


@pytest.mark.parametrize("args", [("test_sizes.py::test_size[small]",), ("--lf",)], ids=str)
def test_pruning_keeps_tests_not_collected(project: Project, args: tuple[str, ...]) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")

    project.run("--gpumem-prune-baselines", *args, use=("cacheprovider",))

    assert len(peaks(project)) == 2


def test_an_interrupted_session_prunes_nothing(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    project.write(test_sizes="def test_other(): pass", test_broken="raise RuntimeError")

    result = project.run("--gpumem-prune-baselines")

    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert len(peaks(project)) == 2


def test_pruning_works_from_the_controller_of_workers(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    project.write(
        test_sizes="""
        @pytest.mark.gpumem
        @pytest.mark.parametrize("name", ["small", "other"])
        def test_size(name):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        """
    )

    project.run_apart("--gpumem-prune-baselines", "-n2")

    assert peaks(project) == {"test_sizes.py.json::test_size[small]": 512}


def test_a_damaged_file_fails_its_tests_in_one_sentence_and_is_kept(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    (path,) = (project.path / "baselines").rglob("*.json")
    path.write_text("{")

    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*test_sizes.py.json is damaged*delete it"])
    # Measured before, so its number is known.
    result.stdout.re_match_lines([r"  test_\S+ +[\d.]+ \wiB .* -$"])
    result.stdout.no_fnmatch_line("*Traceback*")

    update = project.run("--gpumem-update-baselines")
    update.assert_outcomes(passed=2)
    assert update.ret == pytest.ExitCode.TESTS_FAILED
    update.stdout.fnmatch_lines(["*test_sizes.py.json is damaged*"])
    assert path.read_text() == "{"


def test_a_folder_that_cannot_be_written_fails_the_run(project: Project) -> None:
    write_sizes(project)
    (project.path / "baselines").write_text("a file")

    result = project.run("--gpumem-update-baselines")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot be *"])


def test_collecting_only_writes_nothing(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    before = project.baselines()
    project.write(test_sizes="")

    project.run("--gpumem-update-baselines", "--gpumem-prune-baselines", "--collect-only")

    assert project.baselines() == before


def test_another_environment_s_baseline_is_shown_and_never_compared(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    write_sizes(project, large=8192)

    result = project.run("--gpumem-require-baselines", device="--gpumem-device=sim:L4")

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*none is stored for sim-L4*stored elsewhere: sim-T4*4.0 KiB*"])


def test_the_json_report_holds_baseline_and_verdicts(project: Project) -> None:
    write_sizes(project)
    project.run("--gpumem-update-baselines")
    write_sizes(project, large=8192)

    large = project.report()["test_sizes.py::test_size[large]"]

    assert large["baseline"]["peak_allocated"] == 4096
    verdict = next(v for v in large["verdicts"] if v["phase"] is None)
    assert {key: verdict[key] for key in ("kind", "metric", "limit", "actual", "reference")} == {
        "kind": "baseline",
        "metric": "peak_allocated",
        "limit": 4096,
        "actual": 8192,
        "reference": 4096,
    }
    assert not verdict["passed"]
    json.dumps(large)


def test_a_report_that_cannot_be_written_fails_the_run(project: Project) -> None:
    write_sizes(project)
    (project.path / "taken").mkdir()

    result = project.run(f"--gpumem-report=json:{project.path / 'taken'}")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*taken cannot be written*"])
