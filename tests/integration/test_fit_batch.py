"""A search for the largest batch inside a test, whose numbers stay the test's own."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

MIB = 1 << 20

SEARCHING = """
    from pytest_gpumem import fit_batch

    class Step:
        "100 MiB of model, made by the first call, and 3 MiB for each sample."

        model = None

        def __call__(self, batch):
            if self.model is None:
                self.model = torch.empty(25 << 20, device="cuda")
            torch.empty(batch * 3 << 18, device="cuda")
"""


@pytest.mark.parametrize("search", ["gpumem.fit_batch", "fit_batch"])
def test_a_search_breaks_no_limit_of_its_test(project: Project, search: str) -> None:
    project.write(
        test_it=SEARCHING
        + f"""
    @pytest.mark.gpumem(max="107MiB", max_reserved="120MiB", max_leak=0)
    def test_search(gpumem):
        step = Step()
        before = torch.empty(1 << 20, device="cuda")
        fit = {search}(step, [10, 20])
        # Of 15,102.06 MiB: 100 for the model, 20 for the segment of the other tensor.
        assert fit.largest == 4994
        step(1)
    """
    )
    tests = project.report()
    measurement = tests["test_it.py::test_search"]["measurement"]
    assert tests["test_it.py::test_search"]["outcome"] == "passed"
    # The model, which the search leaves, counts from there on.
    assert measurement["peak_allocated"] == (4 + 100 + 3) * MIB
    assert measurement["leaked"] == 0


def test_phases_of_the_search_are_not_phases_of_the_test(project: Project) -> None:
    project.write(
        test_it="""
    def test_search(gpumem):
        layer = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())

        def step(batch):
            layer(torch.ones(batch, 1024, device="cuda")).sum().backward()
            with gpumem.phase("update"):
                optimizer.step()

        gpumem.fit_batch(step, [64, 128])
        assert list(gpumem.phases) == []
        step(64)
    """
    )
    tests = project.report()
    phases = tests["test_it.py::test_search"]["measurement"]["phases"]
    assert {name: phase["entered"] for name, phase in phases.items()} == {
        "setup": 1, "call": 1, "forward": 1, "backward": 1, "update": 1, "step": 1
    }  # fmt: skip
    # The search has left these phases.
    assert phases["forward"]["composition"]["gradients"] == 4 * MIB + 4096


def test_a_fixture_that_searches_is_not_charged_for_it(project: Project) -> None:
    project.write(
        test_it=SEARCHING
        + """
    @pytest.fixture
    def largest():
        step = Step()
        return fit_batch(step, [10, 20]).largest

    @pytest.mark.gpumem(max="1MiB")
    def test_it(largest):
        assert largest == 5000
        torch.empty(1 << 18, device="cuda")
    """
    )
    measurement = project.report()["test_it.py::test_it"]["measurement"]
    assert measurement["peak_allocated"] == MIB
    assert measurement["phases"]["setup"]["peak_allocated"] == 100 * MIB
