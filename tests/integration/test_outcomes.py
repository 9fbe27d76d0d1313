"""A verdict is an ordinary failure of the call: xfail, skip, -x and --lf see it as such."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

TOO_LARGE = """
    @pytest.mark.gpumem(max=1)
    def test_too_large():
        torch.empty(1, device="cuda")
"""


def outcome(test: dict[str, object]) -> tuple[object, object]:
    return test["outcome"], test["judged"]


def test_a_failed_verdict_may_be_an_expected_failure(project: Project) -> None:
    project.write(
        test_xfail="""
        @pytest.mark.gpumem(max=1)
        @pytest.mark.xfail(strict=True)
        def test_strict():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem(max=1)
        @pytest.mark.xfail(raises=ValueError)
        def test_other_error():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        @pytest.mark.xfail(strict=True)
        def test_xpass():
            torch.empty(1, device="cuda")

        @pytest.mark.gpumem
        @pytest.mark.xfail(run=False)
        def test_not_run():
            raise SystemExit
        """
    )

    project.run().assert_outcomes(xfailed=2, failed=2)

    tests = project.report()
    assert {id_.partition("::")[2]: outcome(test) for id_, test in tests.items()} == {
        "test_strict": ("xfailed", True),
        "test_other_error": ("failed", True),
        "test_xpass": ("failed", True),
    }


def test_skipped_tests_are_not_measured(project: Project) -> None:
    project.write(
        test_skip="""
        @pytest.fixture
        def skipping():
            pytest.skip("in a fixture")

        @pytest.mark.gpumem
        @pytest.mark.skip(reason="always")
        def test_mark():
            raise SystemExit

        @pytest.mark.gpumem
        @pytest.mark.skipif("torch.cuda.is_available()", reason="seen on the simulated GPU")
        def test_condition():
            raise SystemExit

        @pytest.mark.gpumem
        def test_fixture(skipping):
            raise SystemExit

        @pytest.mark.gpumem
        def test_body():
            torch.empty(1, device="cuda")
            pytest.skip("in the body")

        @pytest.mark.gpumem(max="1KiB")
        def test_after():
            torch.empty(1, device="cuda")
        """
    )

    assert list(project.report()) == ["test_skip.py::test_after"]
    project.run().assert_outcomes(skipped=4, passed=1)


def test_exit_first_stops_at_a_failed_verdict(project: Project) -> None:
    project.write(test_first=TOO_LARGE, test_second=TOO_LARGE)

    project.run("-x").assert_outcomes(failed=1)


def test_last_failed_selects_a_test_that_failed_by_its_memory(project: Project) -> None:
    project.write(
        test_last=TOO_LARGE
        + """
    @pytest.mark.gpumem
    def test_fine():
        torch.empty(1, device="cuda")
    """
    )

    project.run(use=("cacheprovider",)).assert_outcomes(passed=1, failed=1)
    result = project.run("--lf", use=("cacheprovider",))

    result.assert_outcomes(failed=1)


def test_a_fixture_error_leaves_the_next_test_unchanged(project: Project) -> None:
    project.write(
        test_error="""
        @pytest.fixture
        def broken():
            held = torch.empty(4096, device="cuda")
            raise RuntimeError("in the fixture")

        @pytest.fixture
        def broken_teardown():
            yield torch.empty(4096, device="cuda")
            raise RuntimeError("in teardown")

        @pytest.mark.gpumem
        def test_broken(broken):
            pass

        @pytest.mark.gpumem
        def test_broken_teardown(broken_teardown):
            pass

        @pytest.mark.gpumem(max=512, max_leak=0)
        def test_after():
            torch.empty(1, device="cuda")
        """
    )

    project.run().assert_outcomes(passed=2, errors=2)


def test_an_interrupted_body_restores_torch_and_the_process(project: Project) -> None:
    project.write(
        conftest="""
        CALL = torch.nn.Module.__call__

        @pytest.hookimpl(trylast=True)
        def pytest_unconfigure(config):
            print("as before:", torch.nn.Module.__call__ is CALL, torch.cuda.is_available())
        """,
        test_interrupt="""
        @pytest.mark.gpumem
        def test_interrupt():
            torch.empty(1, device="cuda")
            raise KeyboardInterrupt
        """,
    )

    result = project.run_apart("-s")

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["as before: True False"])


def test_without_the_plugin_marked_tests_are_ordinary_tests(project: Project) -> None:
    project.write(
        test_plain="""
        @pytest.mark.gpumem(max=1)
        def test_plain():
            torch.ones(1000)
        """
    )

    result = project.run_without_plugin("-W", "ignore::pytest.PytestUnknownMarkWarning")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("gpumem: *")


def test_several_failed_verdicts_are_one_failure(project: Project) -> None:
    project.write(
        test_several="""
        @pytest.mark.gpumem(max=1, max_reserved=1)
        def test_several():
            torch.empty(1, device="cuda")
        """
    )

    result = project.run()

    result.stdout.fnmatch_lines(
        ["the test reserved 2.0 MiB*over*", "the test peaked at 512 B, 511 B over*"]
    )


@pytest.mark.parametrize(("warmup", "repeat", "runs"), [(0, 1, 1), (2, 1, 3), (1, 2, 3)])
def test_warm_up_and_repeat_run_the_body_and_the_last_run_counts(
    project: Project, warmup: int, repeat: int, runs: int
) -> None:
    project.write(
        test_warm=f"""
        count = 0
        cache = []

        @pytest.mark.gpumem(warmup={warmup}, repeat={repeat}, max_leak={512 if runs == 1 else 0})
        def test_warm(gpumem):
            global count
            count += 1
            if not cache:
                cache.append(torch.empty(1, device="cuda"))
            with gpumem.phase("work"):
                torch.empty(1024 * count, device="cuda")

        def test_count():
            assert count == {runs}
        """
    )

    tests = project.report()
    measurement = tests["test_warm.py::test_warm"]["measurement"]

    assert measurement["peak_allocated"] == 512 + runs * 4096
    assert measurement["phases"]["work"]["entered"] == 1
    assert measurement["allocated_before"] == (0 if runs == 1 else 512)
    assert tests["test_warm.py::test_warm"]["outcome"] == "passed"


def test_a_failing_warm_up_run_fails_the_test(project: Project) -> None:
    project.write(
        test_warm="""
        runs = []

        @pytest.mark.gpumem(warmup=3)
        def test_warm():
            runs.append(1)
            assert len(runs) != 2, "second run"

        def test_runs():
            assert len(runs) == 2
        """
    )

    result = project.run()

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*second run*"])


def test_the_option_all_measures_unmarked_tests_without_judging(project: Project) -> None:
    project.write_ini("gpumem_max = 1KiB")
    project.write(
        test_all="""
        def test_unmarked():
            torch.empty(8192, device="cuda")

        def test_on_the_cpu():
            torch.ones(3)
        """
    )

    tests = project.report("--gpumem-all")

    assert {id_: (test["outcome"], test["judged"]) for id_, test in tests.items()} == {
        "test_all.py::test_unmarked": ("passed", False)
    }
