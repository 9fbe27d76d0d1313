"""A machine with several simulated GPUs: every device that a test touches is judged."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

TWO = "--gpumem-device=sim:T4*2"
WORKSPACE = 8_519_680

HALVES = """
    import torch.nn as nn

    @pytest.fixture(scope="module")
    def halves():
        return nn.Linear(100, 200).to("cuda:0"), nn.Linear(200, 50).to("cuda:1")

    def step(halves):
        first, second = halves
        x = torch.randn(8, 100, device="cuda")
        second(first(x).to("cuda:1")).sum().backward()
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
"""


@pytest.mark.usefixtures("plain_workspaces")
def test_every_device_that_a_test_touches_is_measured(project: Project) -> None:
    project.write(
        test_halves=HALVES
        + """
    @pytest.mark.gpumem
    def test_step(halves):
        step(halves)

    @pytest.mark.gpumem
    def test_step_again(halves):
        step(halves)

    @pytest.mark.gpumem
    def test_first_alone():
        torch.zeros(1000, device="cuda")
    """
    )

    tests = project.report(device=TWO)

    first, again = tests["test_halves.py::test_step"], tests["test_halves.py::test_step_again"]
    assert first["environment"]["gpu"] == "T4*2"
    measurement, (other,) = first["measurement"], first["other_devices"]
    assert [measurement["device"], other["device"]] == ["cuda:0", "cuda:1"]
    # Each device is charged for its half of the fixture.
    assert measurement["allocated_before"] == 80_384 + 1_024
    assert other["allocated_before"] == 40_448 + 512
    assert other["phases"]["backward"]["cublas_workspace"] == 2 * WORKSPACE
    assert measurement["leaked"] == other["leaked"] == 0
    assert (again["measurement"], again["other_devices"]) == (measurement, [other])
    assert tests["test_halves.py::test_first_alone"]["other_devices"] == []


@pytest.mark.parametrize(
    ("limit", "broken"),
    [
        ('max="4KiB"', "the test peaked at 8.0 KiB (8,192 B), 4.0 KiB over its limit of 4KiB"),
        ("max_leak=0", "8.0 KiB (8,192 B) still allocated after the test"),
        ('max_reserved="1MiB"', "2.0 MiB (2,097,152 B)"),
    ],
)
def test_limits_hold_for_each_device_and_the_failure_names_it(
    project: Project, limit: str, broken: str
) -> None:
    project.write(
        test_limit=f"""
        kept = []

        @pytest.mark.gpumem({limit})
        def test_second():
            kept.append(torch.zeros(2048, device="cuda:1"))
        """
    )

    result = project.run(device=TWO)

    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert broken in output
    assert "cuda:1" in next(line for line in output.splitlines() if broken in line)


def test_a_test_that_uses_only_the_second_device_is_measured(project: Project) -> None:
    project.write(
        test_second="""
        @pytest.mark.gpumem(max="8KiB")
        def test_second():
            torch.zeros(2048, device="cuda:1")
        """
    )

    report = project.report(device=TWO)["test_second.py::test_second"]

    assert report["outcome"] == "passed"
    assert report["measurement"]["peak_allocated"] == 0
    assert [other["peak_allocated"] for other in report["other_devices"]] == [8_192]


def test_each_test_begins_on_the_first_device(project: Project) -> None:
    project.write(
        test_current="""
        @pytest.fixture(scope="module")
        def second():
            torch.cuda.set_device(1)

        @pytest.mark.gpumem
        def test_leaves_the_second_one_behind():
            torch.cuda.set_device(1)
            torch.zeros(1, device="cuda")

        @pytest.mark.gpumem
        def test_begins_anew():
            assert torch.zeros(1, device="cuda").get_device() == 0

        @pytest.mark.gpumem
        def test_fixture_chooses(second):
            assert torch.zeros(1, device="cuda").get_device() == 1

        @pytest.mark.gpumem
        def test_fixture_has_chosen(second):
            assert torch.zeros(1, device="cuda").get_device() == 1
        """
    )

    project.run(device=TWO).assert_outcomes(passed=4)


def test_a_marker_may_name_several_gpus_of_a_model(project: Project) -> None:
    project.write(
        test_machine="""
        @pytest.mark.gpumem(gpu=["T4", "A10*2"])
        def test_count():
            torch.zeros(1, device="cuda")
            print("devices:", torch.cuda.device_count())
        """
    )

    result = project.run("-v", "-s", device="--gpumem-device=sim")

    result.stdout.fnmatch_lines(["*test_count?T4? devices: 1", "*test_count?A10?2? devices: 2"])


def test_baselines_of_several_gpus_have_their_own_environment(project: Project) -> None:
    project.write(
        test_step="""
        @pytest.mark.gpumem(baseline=True)
        def test_step():
            torch.zeros(2048, device="cuda:0")
            torch.zeros(2048, device="cuda:1")
        """
    )

    project.run("--gpumem-update-baselines", device=TWO).assert_outcomes(passed=1)

    (path,) = project.baselines()
    assert path.startswith("sim-T4-2-torch")
    project.run(device=TWO).assert_outcomes(passed=1)


def test_data_parallel_skips_the_test_with_one_sentence(project: Project) -> None:
    project.write(
        test_parallel="""
        @pytest.mark.gpumem
        def test_parallel():
            model = torch.nn.DataParallel(torch.nn.Linear(3, 3).cuda())
            model(torch.zeros(4, 3, device="cuda"))
        """
    )

    result = project.run("-rs", device=TWO)

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED*nn.DataParallel over several GPUs at test_parallel.py:6 copies between GPUs*"]
    )


def test_the_header_and_the_table_name_the_number_of_gpus(project: Project) -> None:
    project.write(
        test_step="""
        @pytest.mark.gpumem(max="1MiB")
        def test_step():
            torch.zeros(2048, device="cuda:0")
            torch.zeros(1024, device="cuda:1")
        """
    )

    result = project.run(device=TWO)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["gpumem: simulated T4?2;*", "simulated T4?2 (torch*", "*8.0 KiB*", "*cuda:1*4.0 KiB*"]
    )
