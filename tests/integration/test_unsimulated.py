"""A test that a simulated device cannot run is skipped with a sentence, never passed or xfailed."""

from __future__ import annotations

from tests.pytest_project import Project

NEVER = "--gpumem-sim-values=never"

TESTS = """
    import unittest

    @pytest.mark.gpumem
    def test_reads():
        if (torch.rand(3, device="cuda") > 0).all():
            pass

    @pytest.mark.xfail
    @pytest.mark.gpumem
    def test_expected_to_fail():
        torch.rand(3, device="cuda").tolist()

    @pytest.fixture
    def mask():
        return torch.rand(3, device="cuda").nonzero()

    @pytest.mark.gpumem
    def test_fixture(mask):
        pass

    @pytest.mark.gpumem
    class TestClass(unittest.TestCase):
        def test_method(self):
            torch.testing.assert_close(torch.rand(3, device="cuda"), torch.rand(3, device="cuda"))

    @pytest.mark.gpumem
    def test_that_swallows():
        x = torch.rand(3, device="cuda")
        try:
            x.tolist()
        except Exception:
            pass

    @pytest.mark.gpumem
    def test_sizes():
        torch.empty(torch.rand(3, device="cuda").argmax().item(), device="cuda")

    @pytest.mark.gpumem
    def test_runs():
        torch.rand(3, device="cuda")
"""


def test_a_test_that_needs_values_is_skipped_with_the_source_line(project: Project) -> None:
    project.write(test_values=TESTS)

    result = project.run("-rs", NEVER)

    result.assert_outcomes(passed=1, skipped=6)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED*bool() at test_values.py:* depends on a value of a CUDA tensor*",
            "*test_values.py::test_reads was skipped: bool() at test_values.py:*",
            "*test_values.py::test_expected_to_fail was skipped: tolist() at test_values.py:*",
            "*test_values.py::TestClass::test_method was skipped: *",
        ]
    )


def test_the_report_has_no_numbers_of_skipped_tests(project: Project) -> None:
    project.write(test_values=TESTS)

    assert list(project.report(NEVER)) == ["test_values.py::test_runs"]


THREADS = """
    import threading
    import time

    def left_to_itself(function):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        while thread.is_alive():  # nobody joins it
            time.sleep(0.001)

    @pytest.mark.gpumem
    def test_thread():
        left_to_itself(lambda: torch.rand(3, device="cuda").tolist())

    @pytest.mark.gpumem
    def test_fails_with_thread():
        left_to_itself(lambda: torch.rand(3, device="cuda").tolist())
        assert False

    @pytest.mark.gpumem
    def test_next():
        torch.rand(3, device="cuda")
"""


def test_a_need_for_values_in_an_unjoined_thread_skips_the_test(project: Project) -> None:
    project.write(test_threads=THREADS)

    result = project.run("-rs", NEVER)

    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_threads.py::test_thread was skipped: tolist() at test_threads.py:*"]
    )


def test_a_need_for_values_in_an_unjoined_thread_gets_a_second_run(project: Project) -> None:
    project.write(test_threads=THREADS)

    notes = project.report()["test_threads.py::test_thread"]["measurement"]["notes"]

    assert any("run again with real values on the CPU: tolist()" in note for note in notes)
