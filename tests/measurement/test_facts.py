"""Facts of a test that its memory depends on are recorded while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pytest_project import Project

NET = """
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x
"""


def facts(project: Project, body: str) -> dict[str, Any]:
    project.write(net=NET)
    indented = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    source = f"from net import Net\n\n@pytest.mark.gpumem\ndef test_it():\n{indented}\n"
    (project.path / "test_it.py").write_text(f"import pytest\nimport torch\n{source}")
    (test,) = project.report("test_it.py").values()
    assert test["outcome"] == "passed"
    return dict(test["measurement"]["facts"])


def test_the_facts_of_a_training_step(project: Project) -> None:
    found = facts(
        project,
        """
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.ones(8, 64, device="cuda", requires_grad=True)).sum().backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
""",
    )
    assert found["grad"] == {"on": 2}
    assert found["recomputed"] == ["layers.*"]
    assert found["retain_graph"] == 2
    assert found["zeroed_gradients"] == 2
    assert found["optimizers"] == {"AdamW": {"kind": "foreach", "state": ["exp_avg", "exp_avg_sq"]}}
    assert found["models"]["Net"]["parameters"] == 2 * (64 * 64 + 64)
    assert found["inputs"] == [[8, 64]]


def test_an_optimizer_of_a_library_keeps_numbers_and_tensors_by_names(project: Project) -> None:
    found = facts(
        project,
        """
class Odd(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        self.state["total"] = self.state.get("total", 0) + 1  # MADGRAD and SPAM do so
        self.state["mean"] = torch.zeros(8, device="cuda")
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = parameter.grad.clone()

net = torch.nn.Linear(64, 64).cuda()
optimizer = Odd(net.parameters(), {})
for _ in range(2):
    net(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
""",
    )
    assert found["optimizers"] == {"Odd": {"kind": "for-loop", "state": ["mean", "state"]}}


def test_an_object_that_cannot_be_observed_is_a_note_and_no_failure(project: Project) -> None:
    project.write(
        test_odd="""
        class Odd(torch.nn.Linear):
            def named_parameters(self, *args, **kwargs):
                raise RuntimeError("not now")

        @pytest.mark.gpumem
        def test_it():
            Odd(8, 8, device="cuda")(torch.ones(2, 8, device="cuda")).sum().backward()
    """
    )
    (test,) = project.report("test_odd.py").values()
    assert test["outcome"] == "passed"
    (note,) = test["measurement"]["notes"]
    assert note == (
        "the names of the memory are incomplete, because reading modules and optimizers failed "
        "with RuntimeError: not now"
    )


def test_sizes_are_not_read_while_torchscript_traces(project: Project) -> None:
    found = facts(
        project,
        """
import warnings

warnings.filterwarnings("ignore", ".*torch.jit.trace.* is deprecated")
net = torch.nn.Linear(64, 8).cuda()
traced = torch.jit.trace(net, torch.ones(2, 64, device="cuda"))
assert "numel" not in str(traced.graph)
net(torch.ones(3, 64, device="cuda"))
""",
    )
    assert found["inputs"] == [[2, 64], [3, 64]]  # torch runs what it has traced


def test_torchscript_compiles_functions_that_are_watched(project: Project) -> None:
    found = facts(
        project,
        """
import warnings

def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)

warnings.filterwarnings("ignore", ".*torch.jit.script. is deprecated")
x = torch.ones(1, 2, 8, 16, device="cuda")
attend(x)
torch.jit.script(attend)(x)
""",
    )
    assert found == {"attention": {"fused": 1}}


def test_a_jagged_input_has_no_shape_in_numbers(project: Project) -> None:
    found = facts(
        project,
        """
net = torch.nn.Linear(64, 8).cuda()
words = [torch.ones(length, 64) for length in (5, 9)]
net(torch.nested.nested_tensor(words, layout=torch.jagged, device="cuda"))
net(torch.ones(3, 64, device="cuda"))
""",
    )
    assert found["inputs"] == [[3, 64]]


def test_pending_graphs_and_grad_mode_are_recorded(project: Project) -> None:
    found = facts(
        project,
        """
net = Net().cuda()
x = torch.ones(8, 64, device="cuda")
sum(net(x).sum() for _ in range(3)).backward()
with torch.inference_mode():
    net(x)
""",
    )
    assert found["graphs"] == 3
    assert found["grad"] == {"on": 3, "off": 1}


@pytest.mark.parametrize(
    ("dtype", "head", "attention"),
    [
        ("half", 64, {"fused": 1}),
        ("bfloat16", 64, "no fused kernel takes bfloat16 at compute capability 7.5"),
        ("double", 64, "no fused kernel takes float64"),
        ("half", 63, "no fused kernel takes heads of 63, which 8 does not divide"),
    ],
)
def test_the_kernel_of_attention_is_recorded_with_its_reason(
    project: Project, dtype: str, head: int, attention: object
) -> None:
    """A T4: compute capability 7.5."""
    found = facts(
        project,
        f"""
q = torch.ones(1, 2, 16, {head}, device="cuda", dtype=torch.{dtype})
torch.nn.functional.scaled_dot_product_attention(q, q, q)
""",
    )
    expected = attention if isinstance(attention, dict) else {"unfused": 1, "why": [attention]}
    assert found["attention"] == expected


@pytest.mark.parametrize(
    ("keep", "holder"),
    [
        ("kept.append(out)", {"holder": "kept", "where": "test_it()", "kind": "list"}),
        ("net.seen[step] = out", {"holder": "net.seen", "where": "test_it()", "kind": "dict"}),
        ("KEPT.add(out)", {"holder": "KEPT", "where": "test_it", "kind": "set"}),
    ],
)
def test_memory_that_a_step_leaves_is_recorded_with_its_holder(
    project: Project, keep: str, holder: dict[str, str]
) -> None:
    """Each step keeps its output of 8 × 64 floats, 2,048 bytes, and with it its graph."""
    found = facts(
        project,
        f"""
global KEPT
KEPT = set()
kept = []
net = Net().cuda()
net.seen = {{}}
for step in range(4):
    out = net(torch.ones(8, 64, device="cuda"))
    {keep}
    del out
""",
    )["carried"]["holders"][0]
    assert {key: found[key] for key in holder} == holder
    assert found["held"] == [2048, 4096, 6144]
    assert found["graph"] == 0  # checkpointing keeps no tensor of it


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="torch does not show what is saved"
)
@pytest.mark.parametrize(
    ("backward", "graph"), [("", [2048, 4096, 6144]), ("\n    kept[-1].backward()", [0, 0, 0])]
)
def test_the_graph_counts_until_backward_frees_it(
    project: Project, backward: str, graph: list[int]
) -> None:
    """``sigmoid`` keeps its result, 8 × 64 floats; the sum is 512 bytes."""
    found = facts(
        project,
        f"""
sigmoid = torch.nn.Sigmoid()
x = torch.ones(8, 64, device="cuda", requires_grad=True)
kept = []
for step in range(4):
    out = sigmoid(x)
    kept.append(out.sum()){backward}
    del out
""",
    )["carried"]["holders"][0]
    assert (found["holder"], found["kind"]) == ("kept", "list")
    assert found["held"] == [512 + graph[0], 1024 + graph[1], 1536 + graph[2]]
    assert found["graph"] == graph[-1]


def test_a_batch_does_not_count_as_left_by_an_earlier_step(project: Project) -> None:
    """Neither this step's batch, whole or divided, nor a batch loaded ahead counts."""
    found = facts(
        project,
        """
linear = torch.nn.Linear(64, 64).cuda()
ahead = torch.ones(8, 64).cuda()
for step in range(4):
    batch, ahead = ahead, torch.ones(8, 64).cuda()
    linear(batch / 2)
""",
    )
    assert all(holder["batches"] for holder in found.get("carried", {}).get("holders", []))


def test_a_search_for_holders_keeps_no_memory(project: Project) -> None:
    """Up to Python 3.12, a frame keeps the values that its ``f_locals`` has returned."""
    project.write(
        test_it="""
        import weakref

        @pytest.mark.gpumem(max_leak=0)
        def test_it():
            net = torch.nn.Linear(8, 8).cuda()
            out = net(torch.ones(4, 8, device="cuda"))
            for step in range(3):
                seen = weakref.ref(out)
                new = net(torch.ones(4, 8, device="cuda"))  # the variable is looked at
                out = new
                del new
                assert seen() is None
        """
    )
    project.run().assert_outcomes(passed=1)
