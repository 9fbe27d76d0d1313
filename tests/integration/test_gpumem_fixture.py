"""The ``gpumem`` fixture: phases, device, numbers."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project


def test_numbers_are_readable_after_a_phase(project: Project) -> None:
    project.write(
        test_phases="""
        @pytest.fixture
        def held():
            return torch.empty(1024, device="cuda")

        def test_read(gpumem, held):
            assert gpumem.device == "cuda:0"
            with gpumem.phase("load"):
                scratch = torch.empty(4096, device="cuda")
                del scratch
                kept = torch.empty(512, dtype=torch.uint8, device="cuda")
            load = gpumem.phases["load"]
            assert load.peak_allocated == 4096 + 16384
            assert load.allocated_before == 4096
            assert load.allocated_after == 4096 + 512
            with pytest.raises(KeyError, match="no phase 'other' has ended yet"):
                gpumem.phases["other"]
        """
    )

    project.run().assert_outcomes(passed=1)


def test_the_fixture_without_a_marker_measures_and_does_not_judge(project: Project) -> None:
    project.write(
        test_unmarked="""
        def test_used(gpumem):
            torch.empty(1024, device=gpumem.device)

        def test_unused(gpumem):
            pass
        """
    )

    tests = project.report()

    assert list(tests) == ["test_unmarked.py::test_used"]
    used = tests["test_unmarked.py::test_used"]
    assert (used["judged"], used["verdicts"], used["expectation"]) == (False, [], {})
    assert used["measurement"]["peak_allocated"] == 4096


def test_phases_nest_and_a_parent_s_peak_is_at_least_a_child_s(project: Project) -> None:
    project.write(
        test_nested="""
        @pytest.mark.gpumem
        def test_nested(gpumem):
            with gpumem.phase("outer"):
                with gpumem.phase("inner"):
                    torch.empty(8192, device="cuda")
                torch.empty(1024, device="cuda")
        """
    )

    phases = project.report()["test_nested.py::test_nested"]["measurement"]["phases"]

    assert {name: phase["peak_allocated"] for name, phase in phases.items()} == {
        "setup": 0,
        "call": 32_768,
        "outer": 32_768,
        "inner": 32_768,
    }
    assert [phases[name]["parent"] for name in ("inner", "outer", "call")] == [
        "outer",
        "call",
        None,
    ]


def test_a_phase_entered_again_keeps_its_highest_peak(project: Project) -> None:
    project.write(
        test_again="""
        @pytest.mark.gpumem
        def test_again(gpumem):
            for size in (1024, 4096, 2048):
                with gpumem.phase("work"):
                    torch.empty(size, dtype=torch.uint8, device="cuda")
        """
    )

    phase = project.report()["test_again.py::test_again"]["measurement"]["phases"]["work"]

    assert (phase["peak_allocated"], phase["entered"]) == (4096, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [("'call'", "keeps this name"), ("''", "a text that is not empty"), ("3", "a text")],
)
def test_a_bad_phase_name_is_refused(project: Project, name: str, message: str) -> None:
    project.write(
        test_name=f"""
        def test_name(gpumem):
            with pytest.raises(ValueError, match={message!r}):
                gpumem.phase({name})
        """
    )

    project.run().assert_outcomes(passed=1)


def test_a_phase_left_by_an_exception_is_closed(project: Project) -> None:
    project.write(
        test_raises="""
        @pytest.mark.gpumem
        def test_raises(gpumem):
            with pytest.raises(RuntimeError):
                with gpumem.phase("broken"):
                    torch.empty(1024, device="cuda")
                    raise RuntimeError
            torch.empty(8192, device="cuda")
            assert gpumem.phases["broken"].peak_allocated == 4096
        """
    )

    project.run().assert_outcomes(passed=1)


def test_phases_of_a_fixture_are_charged_like_the_test(project: Project) -> None:
    project.write(
        test_fixture_phase="""
        @pytest.fixture(scope="module")
        def stranger():
            return torch.empty(4096, device="cuda")

        @pytest.mark.gpumem
        def test_first(stranger):
            pass

        @pytest.fixture
        def model(gpumem):
            with gpumem.phase("load"):
                torch.empty(2048, device="cuda")
                return torch.empty(1024, device="cuda")

        @pytest.mark.gpumem
        def test_second(model):
            pass
        """
    )

    second = project.report()["test_fixture_phase.py::test_second"]["measurement"]

    load = second["phases"]["load"]
    assert (load["allocated_before"], load["peak_allocated"]) == (0, 8192)
    assert load["allocated_after"] == second["allocated_before"] == 4096


def test_watch_keeps_nothing_alive_and_refuses_other_types(project: Project) -> None:
    project.write(
        test_watch="""
        @pytest.mark.gpumem(max_leak=0)
        def test_watch(gpumem):
            model = torch.nn.Linear(8, 8).cuda()
            gpumem.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(TypeError, match=r"gpumem.watch\\(model=3\\): give"):
                gpumem.watch(3)
            with pytest.raises(TypeError, match=r"gpumem.watch\\(optimizer=3\\)"):
                gpumem.watch(model, 3)
        """
    )

    project.run().assert_outcomes(passed=1)


def test_the_fixture_requested_in_an_unmarked_body_is_refused(project: Project) -> None:
    project.write(
        test_dynamic="""
        def test_dynamic(request):
            gpumem = request.getfixturevalue("gpumem")
            with gpumem.phase("forward"):
                pass
            gpumem.watch(None)
            gpumem.phases["forward"]
        """
    )

    result = project.run("-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*reads gpumem.phases*name it among the test's arguments*"])


def test_the_fixture_does_nothing_where_the_plugin_is_off(project: Project) -> None:
    project.write(
        test_off="""
        @pytest.mark.gpumem(max=1)
        def test_plain(gpumem):
            with gpumem.phase("forward"):
                x = torch.ones(8, device=gpumem.device)
            assert x.sum() == 8

        @pytest.mark.gpumem
        def test_reads(gpumem):
            gpumem.phases["forward"]
        """
    )

    result = project.run("-rs", device="--gpumem-device=off")

    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*marked tests ran without being measured*"])
