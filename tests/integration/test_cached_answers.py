"""Functions that cache whether there is a GPU are evaluated anew where one comes or goes."""

from __future__ import annotations

import pytest

from tests.cached_answers import CACHED
from tests.pytest_project import Project


def test_a_cached_answer_follows_the_current_device(project: Project) -> None:
    project.write(test_cached=CACHED)
    project.run_anew("-p", "no:randomly").assert_outcomes(passed=3)


PLAIN = """
@torch.compile(fullgraph=True, backend="eager")
def doubled_on_a_gpu(x):
    return x * 2 if torch.cuda.is_available() else x

def test_plain():
    assert doubled_on_a_gpu(torch.ones(2)).tolist() == [1, 1]
"""


@pytest.mark.parametrize("before", [(), ("-p", "torch._dynamo")])
def test_dynamo_traces_the_question_for_a_gpu_in_a_suite_without_gpu(
    project: Project, before: tuple[str, ...]
) -> None:
    project.write(test_plain=PLAIN)
    result = project.run_anew(*before, device="--gpumem-device=auto")
    result.assert_outcomes(passed=1)


def test_a_cached_tensor_is_created_again_in_the_second_run(project: Project) -> None:
    project.write(
        test_it="""
        import functools

        @functools.lru_cache
        def positions(count):
            return torch.arange(count, device="cuda").float().sin()

        @pytest.mark.gpumem
        def test_it():
            if (torch.ones(8, device="cuda") + positions(8)).sum() > 0:
                torch.ones(8, device="cuda")
        """
    )

    project.run_apart().assert_outcomes(passed=1)
