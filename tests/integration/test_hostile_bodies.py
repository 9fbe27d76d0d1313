"""Code under test can neither end pytest nor change another test's number."""

from __future__ import annotations

import os

import pytest

from tests.integration.hostile_bodies import BODIES, UNMEASURED, project_source
from tests.pytest_project import Project

AFTER = 4096 + 4096 + 512
"""``x``, ``x * 2`` and the sum, for which one block suffices: it is smaller than 512 B."""


@pytest.mark.parametrize("arguments", [(), ("-n2", "-pxdist")], ids=["alone", "xdist"])
def test_a_hostile_body_is_reported_and_changes_no_other_test(
    project: Project, arguments: tuple[str, ...]
) -> None:
    project.write(test_it=project_source())

    tests = project.report(*arguments, apart=True)

    outcomes = {nodeid.partition("::test_")[2]: test["outcome"] for nodeid, test in tests.items()}
    expected = {name: outcome for name, (outcome, _) in BODIES.items()}
    assert {name: outcomes.get(name, UNMEASURED) for name in BODIES} == expected
    after = {
        name: tests[f"test_it.py::test_after_{name}"]["measurement"]["peak_allocated"]
        for name in BODIES
        if f"test_it.py::test_after_{name}" in tests
    }
    assert after == dict.fromkeys(BODIES, AFTER)


def test_a_worker_that_ends_loses_only_its_own_test(project: Project) -> None:
    project.write(
        test_it="""
    import os

    @pytest.mark.gpumem
    @pytest.mark.parametrize("number", range(6))
    def test_it(number):
        kept = torch.empty(1024, device="cuda")
        if number == 2:
            os._exit(1)
    """
    )

    tests = project.report("-n2", "-pxdist", apart=True)

    peaks = {nodeid[-2]: test["measurement"]["peak_allocated"] for nodeid, test in tests.items()}
    assert peaks == dict.fromkeys("01345", 4096)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_that_leaves_the_body_ends(project: Project) -> None:
    """It ends as a script does; it went on as a second pytest, which ran the tests that follow."""
    project.write(
        test_forks="""
        import os
        import sys

        @pytest.mark.gpumem
        @pytest.mark.parametrize("end", [None, 3, ValueError])
        def test_fork(end):
            torch.empty(1, device="cuda")
            if not (child := os.fork()):
                if end is ValueError:
                    raise ValueError("of the child")
                return None if end is None else sys.exit(end)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == {None: 0, 3: 3, ValueError: 1}[end]

        def test_that_follows():
            with open("ran", "a") as file:
                file.write("once ")
        """
    )
    result = project.run_anew("-rA")
    result.assert_outcomes(passed=4)
    assert (project.path / "ran").read_text() == "once "
    ends = ["gpumem: process *, forked by test_forks.py::test_fork[[]None], ends with the body"]
    result.stdout.fnmatch_lines([*ends, "ValueError: of the child"])
