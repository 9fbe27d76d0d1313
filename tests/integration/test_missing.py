"""Numbers without a comparison are reported: renamed and deleted tests, leaks, unmarked tests."""

from __future__ import annotations

import shlex

import pytest

from pytest_gpumem.cli import main
from tests.pytest_project import Project

SIZES = """
    @pytest.mark.gpumem
    def test_{}():
        torch.empty({}, dtype=torch.uint8, device="cuda")
"""


def write(project: Project, **sizes: int) -> None:
    project.write(test_sizes="\n".join(SIZES.format(*item) for item in sizes.items()))


def stored(project: Project) -> dict[str, int]:
    return {
        f"{file.partition('/')[2].removesuffix('.json')}::{test}": entry["peak_allocated"]
        for file, tests in project.baselines().items()
        for test, entry in tests.items()
    }


def test_a_renamed_test_is_recognised_and_its_baseline_is_moved(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    project.run("--gpumem-update-baselines", device="--gpumem-device=sim:L4")
    write(project, small=512, very_large=4096, other=1024)

    result = project.run()

    assert result.ret == 0
    lines = result.outlines
    start = lines.index("1 stored baseline has no test any more:")
    assert lines[start + 1 : start + 4] == [
        "  test_sizes.py::test_large: probably test_sizes.py::test_very_large now, that measures "
        "the same",
        '  move it: gpumem baselines move "test_sizes.py::test_large" '
        '"test_sizes.py::test_very_large"',
        "  drop it: pytest --gpumem-device=sim:T4 --gpumem-prune-baselines",
    ]
    _, _, command = lines[start + 2].partition(": gpumem ")
    monkeypatch.chdir(project.path)
    assert main(shlex.split(command)) == 0
    # In both environments.
    assert stored(project) == {
        "test_sizes.py::test_small": 512,
        "test_sizes.py::test_very_large": 4096,
    }
    assert len(project.baselines()) == 2
    assert "stored baseline" not in project.run().stdout.str()


def test_a_renamed_test_fails_a_ci_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    write(project, small=512, very_large=4096)
    monkeypatch.setenv("CI", "true")

    result = project.run()

    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["note: 1 test was compared with nothing, because *another name*"])
    assert project.run("--gpumem-update-baselines").ret == 0


def test_a_deleted_and_an_unrelated_new_test_fail_no_ci_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    write(project, small=512, unlike_any=8192)
    monkeypatch.setenv("CI", "true")

    result = project.run()

    assert result.ret == 0
    result.stdout.fnmatch_lines(["  test_sizes.py::test_large", "  drop it: *"])
    result.stdout.no_fnmatch_line("*move it*")


def test_baselines_of_a_moved_module_are_moved_together(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    (project.path / "unit").mkdir()
    (project.path / "test_sizes.py").rename(project.path / "unit" / "test_sizes.py")

    result = project.run()

    moves = [line for line in result.outlines if line.startswith("  move it: ")]
    assert moves == ['  move it: gpumem baselines move "test_sizes.py" "unit/test_sizes.py"']
    monkeypatch.chdir(project.path)
    assert main(["baselines", "move", "test_sizes.py", "unit/test_sizes.py"]) == 0
    assert stored(project) == {
        "unit/test_sizes.py::test_small": 512,
        "unit/test_sizes.py::test_large": 4096,
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["test_sizes.py::test_gone", "a.py::b"], "holds nothing of test_sizes.py::test_gone"),
        (["test_sizes.py::test_small", "test_sizes.py::test_large"], "already; nothing was moved"),
        (["test_sizes.py", "test_sizes.py::test_large"], "give two tests, or the paths of two"),
        (["test_sizes.py", "test_sizes.py"], "is moved to itself"),
    ],
)
def test_a_baseline_that_cannot_be_moved_is_one_sentence(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    before = stored(project)
    monkeypatch.chdir(project.path)
    capsys.readouterr()

    assert main(["baselines", "move", *arguments]) == 2

    assert sentence in capsys.readouterr().err
    assert stored(project) == before


def test_baselines_of_another_environment_are_named(project: Project) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    (known,) = (file.partition("/")[0] for file in project.baselines())

    result = project.run(device="--gpumem-device=sim:L4")

    result.stdout.fnmatch_lines(
        [
            "no baseline in sim-L4-* for 2 tests:",
            f"2 tests have a baseline in {known} and none in this environment: they were compared "
            "with nothing",
        ]
    )


@pytest.mark.parametrize(
    "hiding",
    [
        ("-o", "python_functions=check_*"),
        ("-o", "python_files=nothing.py", "test_sizes.py"),
        ("-k", "large"),
        ("-p", "hiding"),
        ("--deselect", "test_sizes.py::test_small"),
    ],
    ids=" ".join,
)
def test_pruning_keeps_tests_that_collection_hides(
    project: Project, hiding: tuple[str, ...]
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    project.write(
        hiding="""
        def pytest_pycollect_makeitem(collector, name, obj):
            return [] if name == "test_small" else None
        """
    )

    result = project.run("--gpumem-prune-baselines", *hiding)

    assert len(stored(project)) == 2
    result.stdout.no_fnmatch_line("*stored baseline*")


def test_pruning_reports_tests_whose_function_is_still_defined(
    project: Project,
) -> None:
    write(project, small=512, large=4096)
    project.run("--gpumem-update-baselines")
    source = (project.path / "test_sizes.py").read_text()
    (project.path / "test_sizes.py").write_text(source + "\n\ntest_small.__test__ = False\n")

    result = project.run("--gpumem-prune-baselines")

    assert len(stored(project)) == 2
    result.stdout.fnmatch_lines(
        [
            "  1 stored test not pruned: test_sizes.py still defines test_small, which was not "
            "collected"
        ]
    )


def test_leaks_without_a_limit_are_reported_in_one_line(project: Project) -> None:
    project.write(
        test_leaks="""
        KEPT = []

        @pytest.mark.gpumem
        @pytest.mark.parametrize("kib", [1, 4, 2])
        def test_leak(kib):
            KEPT.append(torch.zeros(kib * 256, device="cuda"))

        @pytest.mark.gpumem
        @pytest.mark.parametrize("n", range(30))
        def test_clean(n):
            torch.zeros(1 << 20, device="cuda")
        """
    )

    result = project.run()

    assert result.ret == 0
    notes = [line for line in result.outlines if line.startswith("note: ")]
    assert notes == [
        "note: 3 tests left memory behind, at most 4.0 KiB (test_leaks.py::test_leak[4]); "
        "max_leak=0 makes that a failure"
    ]
    # Their rows are shown, although their peaks are the smallest.
    rows = [line for line in result.outlines if line.startswith("  test_leak[")]
    assert [row.split()[0] for row in rows][:3] == ["test_leak[1]", "test_leak[4]", "test_leak[2]"]


def test_a_test_with_only_the_fixture_is_told_why_it_is_not_judged(project: Project) -> None:
    project.write(
        test_fixture="""
        def test_one(gpumem):
            torch.zeros(1, device="cuda")

        def test_two(gpumem):
            torch.zeros(1, device="cuda")
        """
    )
    sentence = (
        "note: 2 tests are not judged, like test_fixture.py::test_one: they have the gpumem "
        "fixture and no gpumem marker"
    )
    assert sentence in project.run().outlines
    assert sentence not in project.run("--gpumem-all").outlines


def test_a_misspelt_phase_gets_a_suggestion(project: Project) -> None:
    project.write(
        test_phase="""
        @pytest.mark.gpumem(phases={"forwrad": "1MB"})
        def test_forward():
            torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
        """
    )
    result = project.run()
    result.stdout.fnmatch_lines(
        ["phase forwrad did not run, so its limit of 976.6 KiB was not checked; did you *"]
    )


def test_none_lifts_a_limit_of_the_project_for_one_test(project: Project) -> None:
    project.write_ini("gpumem_max = 1KB\ngpumem_max_leak = 0")
    project.write(
        test_limits="""
        KEPT = []

        @pytest.mark.gpumem
        def test_limited():
            torch.zeros(1024, device="cuda")

        @pytest.mark.gpumem(max=None, max_leak=None)
        def test_free():
            KEPT.append(torch.zeros(1024, device="cuda"))
        """
    )
    project.run().assert_outcomes(passed=1, failed=1)


def test_rows_and_order_of_the_table_are_options(project: Project) -> None:
    project.write(
        test_sized="""
        KEPT = []

        @pytest.mark.gpumem(max=8192)
        @pytest.mark.parametrize("n", [3, 1, 4, 2])
        def test_size(n):
            torch.zeros(n * 1024, device="cuda")
            if n == 2:
                KEPT.append(torch.zeros(128, device="cuda"))
        """
    )

    def rows(*args: str) -> list[str]:
        lines = project.run(*args).outlines
        return [line.split()[0] for line in lines if line.startswith("  test_")]

    assert rows() == [f"test_size[{n}]" for n in (3, 1, 4, 2)]
    assert rows("--gpumem-sort=name") == [f"test_size[{n}]" for n in (1, 2, 3, 4)]
    whole = [f"test_sized.py::test_size[{n}]" for n in (4, 3, 2, 1)]
    assert rows("--gpumem-sort=peak") == whole
    assert rows("--gpumem-sort", "over", "--gpumem-rows", "2") == whole[:2]
    assert rows("--gpumem-sort", "leaked", "--gpumem-rows=1") == ["test_sized.py::test_size[2]"]
    assert len(rows("--gpumem-rows=all")) == 4
