"""Python's garbage collector changes no number, whatever ran before and whatever a test sets."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from pytest_gpumem.garbage import GROWTH
from pytest_gpumem.simulated.gpu.device import parse_version
from tests.pytest_project import Project

CYCLES = """
    import gc

    KIB = 1024

    def make_cycle(nbytes):
        cycle = [torch.empty(nbytes, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)

    def make_cycles(count, nbytes):
        for _ in range(count):
            make_cycle(nbytes)

    @pytest.mark.gpumem
    @pytest.mark.parametrize("count, kib", [(24, 1024), (60, 256), (300, 64), (3000, 4)])
    def test_cycles(count, kib):
        make_cycles(count, kib * KIB)
"""

OTHER_TESTS = """
    @pytest.mark.parametrize("count", [300, 2000])
    def test_makes_objects(count):
        kept = [[] for _ in range(count)]

    @pytest.mark.gpumem
    @pytest.mark.parametrize("count", [100, 9000])
    def test_trains(count):
        torch.nn.Linear(8, 8, device="cuda")(torch.ones(1, 8, device="cuda")).sum().backward()
        kept = [[] for _ in range(count)]
"""

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture(autouse=True)
def old_objects() -> Iterator[None]:
    """Add old objects: CPython runs a full collection only after a quarter as many new ones."""
    kept: list[list[object]] = [[] for _ in range(200_000)]
    gc.collect()
    yield
    kept.clear()


def peaks(
    project: Project, *args: str, apart: bool = False, use: tuple[str, ...] = ()
) -> dict[str, int]:
    return {
        nodeid.partition("::")[2]: test["measurement"]["peak_allocated"]
        for nodeid, test in project.report(*args, apart=apart, use=use).items()
        if "[sim" not in nodeid
    }


def test_garbage_lives_until_enough_blocks_make_a_collection_due(
    project: Project,
) -> None:
    project.write(test_it=CYCLES)

    measured = peaks(project)

    assert measured == {
        "test_cycles[24-1024]": 24 * MIB,
        "test_cycles[60-256]": 15 * MIB,
        "test_cycles[300-64]": 300 * 64 * KIB,
        # A collection leaves the cycle whose block has made it due, which is not garbage yet.
        "test_cycles[3000-4]": (1 + GROWTH + 1) * 4096,
    }


def test_numbers_are_the_same_alone_and_after_other_tests(project: Project) -> None:
    project.write(test_it=CYCLES, test_a=OTHER_TESTS, test_z=OTHER_TESTS)

    names = [f"test_it.py::test_cycles[{name}]" for name in ("24-1024", "60-256", "3000-4")]
    together = peaks(project)
    backwards = peaks(project, "test_z.py", *names[::-1], "test_a.py")

    for name in names:
        test = name.partition("::")[2]
        alone = peaks(project, name, apart=True)[test]
        assert (together[test], backwards[test]) == (alone, alone)


def test_a_body_may_call_gc_collect(project: Project) -> None:
    project.write(
        test_it=CYCLES
        + """
    @pytest.mark.gpumem
    def test_collects():
        for _ in range(10):
            make_cycles(2, 1024 * KIB)
            gc.collect()
"""
    )

    assert peaks(project, "-k", "test_collects") == {"test_collects": 2 * MIB}


def test_settings_of_the_collector_end_with_the_body(project: Project) -> None:
    project.write(
        test_it=CYCLES
        + """
    @pytest.mark.gpumem
    def test_without():
        gc.disable()
        make_cycles(1000, KIB)

    @pytest.mark.gpumem
    def test_never():
        gc.set_threshold(0)
        make_cycles(1000, KIB)

    def test_unmarked():
        gc.disable()
        gc.set_threshold(0)

    @pytest.mark.gpumem
    def test_with():
        make_cycles(1000, KIB)
"""
    )
    before = gc.isenabled(), gc.get_threshold()

    measured = peaks(project, "-k", "not test_cycles")

    assert measured == {
        "test_without": 1000 * KIB,
        "test_never": 1000 * KIB,
        "test_with": (GROWTH + 1) * KIB,
    }
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_a_fixture_may_turn_the_collector_off(project: Project) -> None:
    project.write(
        test_it=CYCLES
        + """
    @pytest.fixture(scope="module")
    def uncollected():
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.gpumem
    @pytest.mark.parametrize("time", [1, 2])
    def test_without(uncollected, time):
        make_cycles(1000, KIB)
"""
    )

    measured = peaks(project, "-k", "test_without")

    assert measured == {"test_without[1]": 1000 * KIB, "test_without[2]": 1000 * KIB}


@pytest.mark.usefixtures("thawed")  # where objects are frozen, all garbage goes
def test_a_body_that_requests_a_fixture_keeps_its_own_garbage(project: Project) -> None:
    gc.collect()
    project.write(
        test_it=CYCLES
        + """
    @pytest.fixture(scope="module")
    def shared():
        make_cycles(3, 1024 * KIB)
        return torch.empty(1024 * KIB, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    @pytest.mark.parametrize("time", [1, 2])
    def test_asks(request, time):
        make_cycles(5, 1024 * KIB)
        request.getfixturevalue("shared")
        make_cycles(5, 1024 * KIB)
"""
    )

    measured = peaks(project, "-k", "test_asks")

    assert measured == {"test_asks[1]": 11 * MIB, "test_asks[2]": 11 * MIB}


def test_old_garbage_is_found_by_a_full_collection(project: Project) -> None:
    project.write(
        test_it="""
    @pytest.mark.gpumem
    def test_drops():
        for _ in range(7):
            cycle = [torch.empty(1024, device="cuda") for _ in range(2000)]
            cycle.append(cycle)
"""
    )

    (peak,) = peaks(project).values()

    # Each list is older than the collections that it makes due. The tenth, after 7,010 blocks, is
    # a full one and finds two of them: the third still has its name while the fourth is made.
    assert 9 * (GROWTH + 1) < 4 * 2000 < 12 * (GROWTH + 1)
    assert peak == (7 - 2) * 2000 * 4096


def test_memory_freed_while_workspaces_are_cleared_is_no_workspace(project: Project) -> None:
    project.write(
        test_it="""
    @pytest.mark.gpumem
    def test_no_product(monkeypatch):
        kept = [torch.empty(1024 * 1024, dtype=torch.uint8, device="cuda")]
        clear = torch._C._cuda_clearCublasWorkspaces

        def dropping():
            kept.clear()  # as a thread might at this moment
            clear()

        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", dropping)

    @pytest.mark.gpumem
    def test_product():
        torch.empty(8, 8, device="cuda") @ torch.empty(8, 8, device="cuda")
"""
    )

    tests = project.report()

    workspaces = [test["measurement"]["cublas_workspace"] for test in tests.values()]
    # Since 2.15 each product returns its workspace: none is left (docs/versions.md).
    left = 8_519_680 if parse_version(torch.__version__) < (2, 15) else 0
    assert workspaces == [0, left]
