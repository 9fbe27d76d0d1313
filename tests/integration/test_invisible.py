"""The meter changes no value that a body reads, and a body cannot disturb the meter."""

from __future__ import annotations

from tests.pytest_project import Project

BODY = """
    def use_memory(phase):
        read = [torch.cuda.max_memory_allocated()]
        with phase("first"):
            torch.empty(8192, device="cuda")
            read.append(torch.cuda.max_memory_allocated())
        with phase("second"):
            torch.empty(1024, device="cuda")
        read.append(torch.cuda.max_memory_allocated())
        read.append(torch.cuda.max_memory_reserved())
        read.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats()
        read.append(torch.cuda.max_memory_allocated())
        with phase("third"):
            torch.empty(2048, device="cuda")
        read.append(torch.cuda.memory_stats()["allocated_bytes.all.peak"])
        return read
"""


def test_a_body_reads_the_same_peaks_as_without_the_plugin(project: Project) -> None:
    project.write(
        test_body=BODY
        + """
    from contextlib import nullcontext

    @pytest.mark.gpumem
    def test_measured(gpumem):
        assert use_memory(gpumem.phase) == [0, 32768, 32768, 2097152, 32768, 0, 8192]

    def test_alone():
        from pytest_gpumem import simulate

        with simulate("T4"):
            read = use_memory(lambda name: nullcontext())
        assert read == [0, 32768, 32768, 2097152, 32768, 0, 8192]
    """
    )

    project.run().assert_outcomes(passed=2)


def test_a_body_that_resets_peaks_does_not_disturb_the_meter(project: Project) -> None:
    project.write(
        test_reset="""
        @pytest.fixture
        def held():
            torch.empty(65536, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            return torch.empty(1024, device="cuda")

        @pytest.mark.gpumem
        def test_reset(held):
            torch.empty(8192, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_max_memory_allocated()
        """,
    )

    tests = project.report("-W", "ignore::FutureWarning")

    measurement = tests["test_reset.py::test_reset"]["measurement"]
    assert measurement["peak_allocated"] == 4096 + 32768
    assert measurement["phases"]["setup"]["peak_allocated"] == 262_144


def test_torch_accelerator_reads_the_same_peaks(project: Project) -> None:
    project.write(
        test_accelerator="""
        @pytest.mark.gpumem
        @pytest.mark.skipif("not hasattr(torch.accelerator, 'max_memory_allocated')")
        def test_accelerator(gpumem):
            with gpumem.phase("first"):
                torch.empty(8192, device="cuda")
            with gpumem.phase("second"):
                torch.empty(1024, device="cuda")
            assert torch.accelerator.max_memory_allocated() == 32768
            torch.accelerator.reset_peak_memory_stats()
            assert torch.accelerator.max_memory_allocated() == 0
        """
    )

    tests = project.report()

    if tests:
        peak = tests["test_accelerator.py::test_accelerator"]["measurement"]["peak_allocated"]
        assert peak == 32768


def test_torch_s_functions_are_restored_after_a_test(project: Project) -> None:
    project.write(
        test_after="""
        import torch.optim.optimizer as optimizer

        ENTRIES = [
            (torch.nn.Module, "__call__"),
            (torch.autograd, "_engine_run_backward"),
            (torch.autograd.graph, "_engine_run_backward"),
        ]
        BEFORE = [getattr(place, name) for place, name in ENTRIES]

        @pytest.mark.gpumem
        @pytest.mark.parametrize("fails", [False, True])
        def test_marked(fails):
            assert torch.nn.Module.__call__ is not BEFORE[0]
            torch.empty(1, device="cuda")
            assert not fails

        def test_after():
            assert [getattr(place, name) for place, name in ENTRIES] == BEFORE
            assert not optimizer._global_optimizer_pre_hooks
            assert not optimizer._global_optimizer_post_hooks
            assert not torch.cuda.is_available()
        """
    )

    project.run().assert_outcomes(passed=2, failed=1)
