"""isolate=True: a test in a process of its own."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

TESTS = """
import os

import conftest

@pytest.mark.gpumem(max="2MiB", isolate=True)
def test_apart(tmp_path, shared):
    assert os.getpid() != int(os.environ["OUTER"])
    x = torch.ones(1 << 18, device="cuda")
    print("said in there")

@pytest.mark.gpumem
def test_here(shared):
    assert os.getpid() == int(os.environ["OUTER"])
    x = torch.ones(1 << 18, device="cuda")
"""

APART = """
@pytest.mark.gpumem(isolate=True)
def test_apart():
    torch.ones(3, device="cuda")
"""

CONFTEST = """
import os

os.environ.setdefault("OUTER", str(os.getpid()))

@pytest.fixture(scope="session")
def shared():
    return os.getpid()
"""


def test_an_isolated_test_has_its_numbers_in_the_report(project: Project) -> None:
    project.write(conftest=CONFTEST, test_it=TESTS)
    tests = project.report(apart=True)
    apart, here = (tests[f"test_it.py::{name}"] for name in ("test_apart", "test_here"))
    assert apart["outcome"] == "passed"
    assert apart["measurement"]["peak_allocated"] == 1 << 20
    assert here["measurement"]["peak_allocated"] == 1 << 20
    assert apart["environment"] == here["environment"]


def test_a_system_without_fork_starts_a_new_process(project: Project) -> None:
    only_spawn = """
        import multiprocessing

        # As Windows has it.
        multiprocessing.get_all_start_methods = lambda: ["spawn"]
    """
    started = """
        import multiprocessing

        @pytest.mark.gpumem(isolate=True)
        def test_apart():
            assert type(multiprocessing.current_process()).__name__ == "SpawnProcess"
            x = torch.ones(1 << 18, device="cuda")
    """
    project.write(conftest=only_spawn, test_it=started)
    tests = project.report(apart=True)
    assert tests["test_it.py::test_apart"]["measurement"]["peak_allocated"] == 1 << 20


def test_an_isolated_test_is_judged_and_its_output_reported(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(max="1MiB", isolate=True)
        def test_apart():
            print("said in there")
            x = torch.ones(1 << 19, device="cuda")
        """
    )
    result = project.run_apart("--gpumem-update-baselines", "-rA")
    result.assert_outcomes(failed=1)
    result.stderr.no_fnmatch_line("*Warning*")
    result.stdout.fnmatch_lines(["*said in there*", "  test_apart  2.0 MiB*FAIL*"])
    assert not project.baselines()


def test_a_process_that_dies_fails_only_its_test(project: Project) -> None:
    project.write(
        test_it="""
        import os, signal

        @pytest.mark.gpumem(isolate=True)
        def test_dies():
            os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.gpumem
        def test_lives():
            x = torch.ones(3, device="cuda")
        """
    )
    result = project.run_apart()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["the process of its own: it ended by SIGKILL in the middle of the test (exit code -9)"]
    )


def test_a_process_that_cannot_start_fails_with_the_reason(project: Project) -> None:
    fails = """
        import os

        def pytest_sessionstart(session):
            if os.getpid() != int(os.environ.setdefault("OUTER", str(os.getpid()))):
                raise OSError("no GPU is left for this process")
    """
    test = """
        @pytest.mark.gpumem(isolate=True)
        def test_apart():
            pass
    """
    project.write(conftest=fails, test_it=test)
    result = project.run_apart()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*process of its own: OSError: no GPU is left for this process"])


def test_workers_store_baselines_of_isolated_tests(project: Project) -> None:
    project.write(conftest=CONFTEST, test_it=TESTS.replace("== int", "!= 0 or int"))
    project.run_apart("-n2", "--gpumem-update-baselines").assert_outcomes(passed=2)
    (stored,) = project.baselines().values()
    assert sorted(stored) == ["test_apart", "test_here"]


def test_an_isolated_test_runs_beside_workers_that_share_a_device(project: Project) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(isolate=True)
        def test_apart():
            torch.ones(1024, device="cuda")

        @pytest.mark.gpumem
        def test_here():
            torch.ones(2048, device="cuda")
        """
    )
    project.run_apart("-n2", "--gpumem-share").assert_outcomes(passed=2)


@pytest.mark.parametrize("options", [("-k", "apart"), ("-m", "gpumem", "-x")])
def test_options_that_select_tests_do_not_apply_in_its_process(
    project: Project, options: tuple[str, ...]
) -> None:
    project.write(
        test_it="""
        @pytest.mark.gpumem(isolate=True)
        @pytest.mark.parametrize("x", ["a b", "c::d", "é"])
        def test_apart(x):
            torch.ones(3, device="cuda")
        """
    )
    project.run_apart(*options).assert_outcomes(passed=3)


def test_isolated_tests_run_with_pytest_rerunfailures(project: Project) -> None:
    """pytest-rerunfailures looks in each process but the controller for its counter's address."""
    project.write(test_it=APART)
    project.run_apart("--reruns=1", use=("rerunfailures",)).assert_outcomes(passed=1)


def test_an_isolated_test_needs_no_folder_of_pytests(project: Project) -> None:
    project.write(test_it=APART)
    project.run_apart("-p", "no:tmpdir").assert_outcomes(passed=1)


@pytest.mark.parametrize("name", ["randomly_seed", "cov_master_host", "cov_master_topdir"])
def test_plugins_find_what_they_read_in_any_worker(project: Project, name: str) -> None:
    """As pytest-randomly 5 does in pytest_configure, and pytest-cov in pytest_sessionstart."""
    project.write(
        conftest=f"""
        def pytest_sessionstart(session):
            assert "{name}" in getattr(session.config, "workerinput", ["{name}"])
        """,
        test_it=APART,
    )
    project.run_apart().assert_outcomes(passed=1)


def test_an_isolated_test_has_the_seed_of_pytest_randomly(project: Project) -> None:
    pytest.importorskip("pytest_randomly")
    project.write(
        test_it="""
        @pytest.mark.gpumem(isolate=True)
        def test_apart(request):
            assert request.config.option.randomly_seed == 7
            torch.ones(3, device="cuda")
        """
    )
    result = project.run_apart("--randomly-seed=7", use=("randomly",))
    result.assert_outcomes(passed=1)
