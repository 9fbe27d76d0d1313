"""Simulated tests with streams and graphs: each starts with a clean state."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

BEGINS_ANEW = """
    @pytest.mark.gpumem(max="4MiB", max_reserved="20MiB")
    def test_begins_anew():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
        x = torch.empty(1 << 20, device="cuda")
        (segment,) = torch.cuda.memory_snapshot()
        assert not segment["is_expandable"]
        assert segment["segment_pool_id"] == (0, 0)
        assert torch.cuda.Stream().stream_id == 3
        torch.cuda.synchronize()
"""


def test_streams_and_settings_of_a_test_are_reset_for_the_next(project: Project) -> None:
    first = """
    @pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated")
    @pytest.mark.gpumem(max="4MiB")
    def test_leaves_everything():
        assert torch.cuda.Stream().stream_id == 3
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        torch.empty(1 << 20, device="cuda")
    """
    project.write(test_streams=first + BEGINS_ANEW)

    project.run().assert_outcomes(passed=2)


@pytest.mark.parametrize("body", ["torch.empty(1 << 20, device='cuda')", "pass"])
def test_a_capture_without_an_end_is_ended(project: Project, body: str) -> None:
    first = f"""
    @pytest.mark.gpumem
    def test_captures():
        x = torch.empty(1, device="cuda")
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.cuda.CUDAGraph().capture_begin()
        {body}
    """
    project.write(test_streams=first + BEGINS_ANEW)

    project.run().assert_outcomes(passed=2)


def test_graphs_and_pools_kept_to_the_end_of_the_process_warn_nothing(project: Project) -> None:
    project.write(
        test_it="""
        KEPT = []

        @pytest.mark.gpumem
        def test_it():
            x = torch.ones(10, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x * 2
            KEPT.extend([graph, y, torch.cuda.MemPool()])
        """
    )

    result = project.run_apart()

    result.assert_outcomes(passed=1)
    result.stderr.no_fnmatch_line("*Exception ignored*")
