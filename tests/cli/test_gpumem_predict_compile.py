"""``gpumem predict --compile``: eager code beside compiled code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.cli.targets import MIB, Command, command

pytestmark = [
    pytest.mark.usefixtures("plain_workspaces"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

gpumem = command("predict")

WAVES = dedent(
    """
    import torch


    class Wave(torch.nn.Module):
        def forward(self, x):
            return (x.sin().cos() + 1).exp()


    def module():
        with torch.no_grad():
            return Wave()(torch.ones(256, 1024, device="cuda"))


    def function(backend="inductor"):
        return torch.compile(Wave().forward, backend=backend)(
            torch.ones(256, 1024, device="cuda")
        )


    def not_followed():
        return function("tvm")
    """
)
EAGER = 3 * MIB
"""The input, a sine, and its cosine beside it."""
COMPILED = 2 * MIB
"""The input and the result: all four operators are one kernel."""


@pytest.fixture(autouse=True)
def _wrappers_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def waves(gpumem: Command) -> Command:
    (gpumem.folder / "waves.py").write_text(WAVES)
    return gpumem


def test_modules_are_compiled_where_the_code_compiles_nothing(waves: Command) -> None:
    found = waves.json("waves.py:module", "--gpu", "A100-40GB", "--compile")

    assert found["compiled"] == "modules"
    assert [(one["code"], one["peak_allocated"]) for one in found["gpus"]] == [
        ("eager", EAGER),
        ("compiled", COMPILED),
    ]
    (change,) = found["changes"]
    assert change["peak_allocated"] == COMPILED - EAGER
    forward = change["phases"]["forward"]
    assert forward["peak_allocated"] == COMPILED - EAGER
    assert [(line["bytes"], line["category"], line["operator"]) for line in forward["lines"]] == [
        (-2 * MIB, "temporaries", "torch.cos"),
        (MIB, "activations", "torch.sin + torch.cos + torch.add + torch.exp, fused"),
    ]
    assert {line["site"] for line in forward["lines"]} == {"waves.py:7"}


def test_the_text_compares_eager_with_compiled_code(waves: Command) -> None:
    code, lines = waves("waves.py:module", "--gpu", "A100-40GB", "--compile")

    assert code == 0
    assert lines[1].startswith("it calls no torch.compile: compiled is each module")
    assert [line.split()[:2] for line in lines[4:6]] == [
        ["A100-40GB", "eager"],
        ["A100-40GB", "compiled"],
    ]
    assert lines[8].split()[:5] == ["A100-40GB", "-1.0", "MiB", "(-33.3", "%)"]
    assert "by line, at the peak of forward on A100-40GB:" in lines


def test_code_that_calls_torch_compile_is_not_compiled_further(waves: Command) -> None:
    found = waves.json("waves.py:function", "--gpu", "A100-40GB", "--compile")

    assert found["compiled"] == "target"
    assert [one["peak_allocated"] for one in found["gpus"]] == [EAGER, COMPILED]


def test_code_that_dynamo_cannot_trace_is_named(waves: Command) -> None:
    _, lines = waves("waves.py:not_followed", "--gpu", "A100-40GB", "--compile")

    (note,) = [line for line in lines if line.startswith("note, compiled: ")]
    assert "runs eagerly on a simulated GPU, where backend 'tvm' is not followed" in note


def test_a_module_compiled_before_its_first_call_is_measured(waves: Command) -> None:
    """Its call passes through the wrappers that find phases and attribute memory."""
    with (waves.folder / "waves.py").open("a") as file:
        file.write("\n\ndef whole():\n    with torch.no_grad():\n")
        file.write("        return torch.compile(Wave())(torch.ones(256, 1024, device='cuda'))\n")
    found = waves.json("waves.py:whole", "--gpu", "A100-40GB", "--compile")

    assert [one["peak_allocated"] for one in found["gpus"]] == [EAGER, COMPILED]
