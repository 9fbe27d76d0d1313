"""``@pytest.mark.gpumem(ranks=...)``: a test is one rank of several, or the worst of them."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

STEP = """
    import os
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def sharded():
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
"""
MIB = 1 << 20


def test_a_test_with_a_rank_runs_as_that_rank(project: Project) -> None:
    project.write(
        test_step=STEP
        + """
    @pytest.mark.gpumem(ranks=8, rank=3)
    def test_rank():
        model = sharded()
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        assert os.environ["RANK"] == "3"
        dist.destroy_process_group()

    @pytest.mark.gpumem
    def test_alone():
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
        torch.zeros(1000, device="cuda")
    """
    )
    tests = project.report(device="--gpumem-device=sim:H100")

    rank, alone = tests["test_step.py::test_rank"], tests["test_step.py::test_alone"]
    assert rank["environment"]["ranks"] == "rank 3 of 8"
    assert rank["environment"]["gpu"] == "H100"
    assert rank["measurement"]["device"] == "cuda:3"
    # Unsharded 4 MiB weights become shards of an eighth, one after the other.
    assert rank["measurement"]["peak_allocated"] == 4 * 4 * MIB + MIB // 2
    assert rank["expectation"]["ranks"] == [8]
    assert rank["expectation"]["rank"] == 3
    assert "ranks" not in alone.get("environment", {})
    assert "ranks" not in alone["expectation"]


def test_a_test_may_leave_its_process_group_to_the_next(project: Project) -> None:
    """With GPUs each test's rank is a process, so that none has to end its group."""
    project.write(
        test_step=STEP
        + """
    @pytest.mark.gpumem(ranks=8)
    @pytest.mark.parametrize("number", range(2))
    def test_rank(number):
        sharded()
    """
    )
    assert [test["outcome"] for test in project.report().values()] == ["passed"] * 2


def test_a_list_of_ranks_makes_one_test_of_each(project: Project) -> None:
    project.write(
        test_step=STEP
        + """
    @pytest.mark.gpumem(gpu=["H100", "A100-80GB"], ranks=[2, 4])
    def test_step():
        model = sharded()
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        torch.zeros(dist.get_world_size() * 1024 * 1024, dtype=torch.uint8, device="cuda")
    """
    )
    tests = project.report()
    assert {
        name.partition("[")[2]: (test["environment"]["ranks"], test["environment"]["gpu"])
        for name, test in tests.items()
    } == {
        "H100-2ranks]": ("rank 0 of 2", "H100"),
        "H100-4ranks]": ("rank 0 of 4", "H100"),
        "A100-80GB-2ranks]": ("rank 0 of 2", "A100-80GB"),
        "A100-80GB-4ranks]": ("rank 0 of 4", "A100-80GB"),
    }


@pytest.mark.parametrize(
    ("size", "worst", "ran"),
    [
        ("1024", 0, "0, 7 ran and made the same allocations"),
        ("1024 * (rank == 7) + 512", 7, "0, 3, 5, 6, 7 ran and differ"),
        ("1024 * min(rank, 1) + 512", 1, "0, 1, 3, 7 ran and differ"),
    ],
)
def test_the_worst_rank_is_judged(project: Project, size: str, worst: int, ran: str) -> None:
    project.write(
        test_step=f"""
    import torch.distributed as dist

    @pytest.fixture
    def held():
        return torch.zeros(1000, device="cuda")

    @pytest.mark.gpumem(ranks=8, rank="worst", max=8192)
    def test_step(held):
        rank = dist.get_rank()
        torch.zeros({size}, device="cuda")
    """
    )
    test = project.report(device="--gpumem-device=sim:H100")["test_step.py::test_step"]
    assert test["environment"]["ranks"] == "worst rank of 8"
    assert test["measurement"]["device"] == f"cuda:{worst}"
    assert test["measurement"]["peak_allocated"] == 4096 + (6144 if worst else 4096)
    (note,) = test["measurement"]["notes"]
    assert note.startswith(f"rank {worst} has the highest peak of 8 ranks: {ran}")
    assert [verdict["passed"] for verdict in test["verdicts"]] == [worst == 0]


def test_a_rank_that_fails_is_named(project: Project) -> None:
    project.write(
        test_step="""
    import torch.distributed as dist

    @pytest.mark.gpumem(ranks=8, rank="worst")
    def test_step():
        torch.zeros(10, device="cuda")
        assert dist.get_rank() < 7
    """
    )
    result = project.run(device="--gpumem-device=sim:H100")
    result.stdout.fnmatch_lines(["*assert 7 < 7*"])
    result.assert_outcomes(failed=1)


def test_process_groups_of_a_shared_fixture_last_for_its_tests(project: Project) -> None:
    project.write(
        test_step=STEP
        + """
    @pytest.fixture(scope="module")
    def model():
        return sharded()

    @pytest.mark.gpumem(ranks=8)
    def test_first(model):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()

    @pytest.mark.gpumem(ranks=8)
    def test_second(model):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
    """
    )
    project.run(device="--gpumem-device=sim:H100").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ("rank=3", "rank=3 needs ranks=, the number of ranks"),
        ("ranks=8, rank=8", "rank=8 is none of 8; write an int from 0 to 7, or 'worst'"),
        ("ranks=[8, 4], rank=5", "rank=5 is none of 4"),
        ("ranks=0", "ranks=0 is not a number of ranks; write an int from 1 to 1,048,576, or"),
        ("ranks=[]", "ranks=[] is not a number of ranks"),
        ("ranks=[2, 2]", "ranks=[2, 2] names a number of ranks twice; name each once"),
        ("ranks=2, rank='first'", "rank='first' is not a rank; write an int from 0 up, or 'worst'"),
    ],
)
def test_wrong_ranks_are_a_collection_error(project: Project, keywords: str, sentence: str) -> None:
    project.write(
        test_step=f"""
    @pytest.mark.gpumem({keywords})
    def test_step():
        pass
    """
    )
    result = project.run()
    result.stdout.fnmatch_lines([f"*test_step.py::test_step: gpumem marker: {_plain(sentence)}*"])


def _plain(text: str) -> str:
    return text.replace("[", "[[]")
