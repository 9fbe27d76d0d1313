"""Parts of parameters are parameters, by their module's name; so are gradients and states."""

from __future__ import annotations

from tests.pytest_project import Project

TRAINING = """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    class Net(nn.Module):
        def __init__(self, size=1024):
            super().__init__()
            self.first = nn.Linear(1024, size, bias=False)
            self.second = nn.Linear(size, 1024, bias=False)

        def forward(self, x):
            return self.second(self.first(x))

    def sharded(model, **options):
        for part in model.children():
            fully_shard(part, **options)
        return fully_shard(model, **options)

    def train(model, gpumem, look=None):
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.randn(2, 1024, device="cuda")).sum().backward()
        optimizer.step()
        with gpumem.phase("held"):
            look = look and look()
            torch.empty(1 << 20, device="cuda")

    @pytest.mark.gpumem(ranks=8)
    def test_fully_shard(gpumem):
        train(sharded(Net().cuda()), gpumem)

    @pytest.mark.gpumem(ranks=8)
    def test_half(gpumem):
        train(sharded(Net().cuda(), mp_policy=HALF), gpumem)

    @pytest.mark.gpumem(ranks=8)
    def test_whole(gpumem):
        model = sharded(Net().cuda(), mp_policy=HALF)
        for part in model.children():
            part.set_reshard_after_backward(False)
        train(model, gpumem)

    @pytest.mark.gpumem(ranks=8)
    def test_whole_when_watched(gpumem):
        model = sharded(Net().cuda())
        for part in model.children():
            part.unshard()
        gpumem.watch(model)
        with gpumem.phase("held"):
            torch.empty(1 << 20, device="cuda")

    @pytest.mark.gpumem(ranks=8)
    def test_accumulated(gpumem):
        model = sharded(Net().cuda(), mp_policy=HALF)
        model.set_requires_gradient_sync(False)
        model(torch.randn(2, 1024, device="cuda")).sum().backward()
        with gpumem.phase("held"):
            torch.empty(1 << 20, device="cuda")

    @pytest.mark.gpumem(ranks=8, rank=7)
    def test_padded(gpumem):
        with torch.device("meta"):
            model = Net(1023)
        train(sharded(model).to_empty(device="cuda"), gpumem)

    @pytest.mark.gpumem(ranks=8)
    @pytest.mark.parametrize("original", [False, True])
    def test_flat(gpumem, original):
        policy = ModuleWrapPolicy({nn.Linear})
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"use_orig_params": original, "mixed_precision": half}
        train(FSDP(Net().cuda(), auto_wrap_policy=policy, **options), gpumem)

    @pytest.mark.gpumem(ranks=8)
    def test_parallel(gpumem):
        plan = ColwiseParallel(output_layouts=Replicate())
        mesh = init_device_mesh("cuda", (8,))
        train(parallelize_module(Net().cuda(), mesh, {"first": plan, "second": plan}), gpumem)
"""

WEIGHT = 4 << 20
SHARD = WEIGHT // 8
FIRST, SECOND = 127 * 4096, 128 * 1023 * 4
HELD = ("parameters", "gradients", "optimizer state")


TRAINED = {"parameters": 2 * SHARD, "gradients": 2 * SHARD, "optimizer state": 4 * SHARD}
"""Bytes of two weights; Adam keeps two numbers for each element."""
EXPECTED = {
    "fully_shard": TRAINED,
    # Gathered in half precision, kept in full.
    "half": TRAINED,
    # Meanwhile the modules have the unsharded parameters registered, not the shards.
    "whole": {**TRAINED, "parameters": 2 * SHARD + 2 * WEIGHT // 2},
    "whole_when_watched": {"parameters": 2 * SHARD + 2 * WEIGHT},
    # Added up in the precision that they will be reduced in.
    "accumulated": {"parameters": 2 * SHARD, "gradients": 2 * WEIGHT},
    # 127 rows of 1024 numbers, padded to 128 to be gathered and reduced; 128 of 1023.
    "padded": {
        "parameters": SHARD + SECOND,
        "gradients": SHARD + SECOND,
        "optimizer state": 2 * (FIRST + SECOND),
    },
    "flat[False]": TRAINED,
    "flat[True]": TRAINED,
    "parallel": TRAINED,
}


def test_a_shard_has_the_category_and_name_of_its_parameter(project: Project) -> None:
    project.write(test_ranks=TRAINING)
    tests = project.report()
    phases = {
        nodeid.partition("::test_")[2]: test["measurement"]["phases"]["held"]
        for nodeid, test in tests.items()
    }
    held = {
        name: {kind: size for kind, size in phase["composition"].items() if kind in HELD}
        for name, phase in phases.items()
    }
    assert held == EXPECTED
    for phase in phases.values():
        owners = {site["module"] for site in phase["sites"] if site["category"] in HELD}
        assert owners == {"first", "second"}
    reduced = [site for site in phases["fully_shard"]["sites"] if site["category"] == "gradients"]
    assert [site["operator"] for site in reduced] == ["reduce-scatter"] * 2
