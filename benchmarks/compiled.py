"""What torch.compile changes: peaks, saved activations and what comes on top, eager and compiled.

    python benchmarks/compiled.py [NAME...]

Each program runs forward and backward in its third step, gradients kept from the step before, so
that what is there at its start is parameters, gradients and inputs. *Saved* is what a forward pass
leaves for backward, with its output. *Beyond* is how much more the peak needs: temporaries of
forward or backward, less what backward has freed by then.

The last columns are the peaks that Inductor's own planning expects of its graphs, forward and
backward, and what the wrappers of the same graphs requested in a step more, from their call to
their return, each beyond what was there when they were called. The plan is how long each buffer
lives (`torch._inductor.memory.compute_memory_timeline`), as code generation has carried it out:
buffers that are written where another has been, in place or afterwards, are one, and what a kernel
of Inductor's own has for a workspace is one more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from models import bert_base, classified_text, vit_base
from producers.blocks import DiffusionUNet, LlamaBlock
from producers.vision import resnet50
from torch import Tensor, nn
from torch._inductor import memory
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.virtualized import V
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._ordered_set import OrderedSet
from training_step import Gpt2

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

MIB = 2**20
STEPS = 3

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Peaks:
    """One step, in bytes beyond what was there at its start."""

    saved: int
    peak: int

    @property
    def beyond(self) -> int:
        """What the peak needs beyond what is saved."""
        return self.peak - self.saved


def compiled_module(module: nn.Module, **options: Any) -> Any:
    """``module`` on the GPU, compiled."""
    return torch.compile(module.to("cuda"), **options)


def mlp() -> Step:
    """Six layers with GELU and layer norm, float32."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()) for _ in range(6)]
    model = compiled_module(nn.Sequential(*layers))
    x = torch.randn(8192, 1024, device="cuda")
    return lambda: model(x).sum()


def gpt2() -> Step:
    """GPT-2 small with its loss, 4 x 1024 tokens, under bfloat16 autocast."""
    model = Gpt2(12).to("cuda")
    tokens = torch.zeros(4, 1024, dtype=torch.long, device="cuda")

    @torch.compile
    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result: Tensor = loss(tokens)
        return result

    return step


def llama() -> Step:
    """One block of Llama 3 8B, 4096 tokens, bfloat16."""
    model = compiled_module(LlamaBlock().bfloat16())
    x = torch.randn(1, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return lambda: model(x).sum()


def resnet() -> Step:
    """ResNet-50, 32 images, float32."""
    model = compiled_module(resnet50().train())
    x = torch.randn(32, 3, 224, 224, device="cuda")
    return lambda: model(x).sum()


def bert() -> Step:
    """BERT-base with dropout, 32 x 128 tokens, float32."""
    model = compiled_module(bert_base().train())
    inputs = {name: value.to("cuda") for name, value in classified_text(32, 128).items()}
    return lambda: model(**inputs).loss


def vit() -> Step:
    """ViT-B/16, 32 images, float32."""
    model = compiled_module(vit_base().train())
    inputs = {
        "pixel_values": torch.ones(32, 3, 224, 224, device="cuda"),
        "labels": torch.zeros(32, dtype=torch.long, device="cuda"),
    }
    return lambda: model(**inputs).loss


def flex() -> Step:
    """FlexAttention with a causal block mask, 8 heads, 4096 tokens, bfloat16."""
    q, k, v = (
        torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    mask = create_block_mask(_causal, None, None, 4096, 4096, device="cuda")
    attention: Any = torch.compile(flex_attention)
    return lambda: attention(q, k, v, block_mask=mask).sum()


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def unet() -> Step:
    """A diffusion U-Net, 8 latents of 64 x 64, float32."""
    model = compiled_module(DiffusionUNet())
    x = torch.randn(8, 4, 64, 64, device="cuda")
    step = torch.zeros(8, device="cuda")
    return lambda: model(x, step).square().mean()


PROGRAMS: dict[str, Callable[[], Step]] = {
    "MLP": mlp,
    "GPT-2 small": gpt2,
    "Llama block": llama,
    "ResNet-50": resnet,
    "BERT, dropout": bert,
    "ViT-B/16": vit,
    "FlexAttention": flex,
    "diffusion U-Net": unet,
}


def measured(step: Step) -> Peaks:
    """The last of some steps."""
    for _ in range(STEPS - 1):
        step().backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    forward = torch.cuda.max_memory_allocated() - before
    saved = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    backward = torch.cuda.max_memory_allocated() - before
    return Peaks(saved, max(forward, backward))


# Inductor's own planning.


@dataclass(frozen=True)
class GraphPeak:
    """Of one graph, in bytes beyond what was there when it was called."""

    planned: int
    requested: int


class Planning:
    """What Inductor expects graphs to need, while they are made, and what they request."""

    def __init__(self) -> None:
        self.planned: dict[tuple[int | None, bool], int] = {}
        """By number of a graph, forward or backward."""
        self.peaks: dict[bool, GraphPeak] = {}
        """Of the largest graph, forward (False) and backward."""
        self._reused: dict[str, str] = {}
        self._workspaces: list[Any] = []
        """As the timeline has buffers."""

    @contextmanager
    def going(self) -> Iterator[None]:
        """Note the plans of graphs inside."""
        with (
            patch.object(GraphLowering, "codegen", self._noting(GraphLowering.codegen)),
            patch.object(
                PythonWrapperCodegen,
                "make_buffer_reuse",
                self._reusing(PythonWrapperCodegen.make_buffer_reuse),
            ),
            patch.object(
                PythonWrapperCodegen,
                "generate_workspace_allocation",
                self._working(PythonWrapperCodegen.generate_workspace_allocation),
            ),
            # A plan is only made where code is.
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Note what the wrappers of graphs request inside."""
        with patch.object(CompiledFxGraph, "__call__", self._measuring(CompiledFxGraph.__call__)):
            yield

    def _noting(self, codegen: Callable[[GraphLowering], Any]) -> Callable[[GraphLowering], Any]:
        def codegen_and_note(graph: GraphLowering) -> Any:
            self._reused.clear()
            self._workspaces.clear()
            made = codegen(graph)
            self.planned[graph.graph_id, graph.is_backward] = self._peak(graph)
            return made

        return codegen_and_note

    def _peak(self, graph: GraphLowering) -> int:
        """Beyond the graph's inputs, of which those that are saved for backward end in it."""
        nodes = graph.scheduler.nodes
        inputs = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs))
        ending = {name: each for name, each in inputs.items() if not name.startswith("primals")}
        outputs = OrderedSet(graph.get_output_names())
        timeline, _, _ = memory.compute_memory_timeline(nodes, ending, outputs)
        changes = [0] * (len(nodes) + 1)
        for one in [*timeline, *self._workspaces]:
            name = one.buffer.get_name()
            if name in graph.removed_buffers:
                continue
            if name not in self._reused:
                changes[one.start_step] += one.size_alloc
            if name not in self._reused.values() and one.end_step != AT_THE_END:
                changes[one.end_step + 1] -= one.size_free
        return max(accumulate(changes)) - sum(each.mpi_buffer.size_free for each in ending.values())

    def _reusing(self, write: Callable[..., str]) -> Callable[..., str]:
        def make_buffer_reuse(codegen: Any, old: Any, new: Any, delete_old: bool) -> str:
            self._reused[new.get_name()] = old.get_name()
            return write(codegen, old, new, delete_old)

        return make_buffer_reuse

    def _working(self, write: Callable[..., None]) -> Callable[..., None]:
        def generate_workspace_allocation(codegen: Any, workspace: Any) -> None:
            scheduler: Any = V.graph.scheduler
            step = scheduler.nodes.index(scheduler.current_node)
            size = V.graph.sizevars.optimization_hint(workspace.count) * workspace.dtype.itemsize
            self._workspaces.append(memory.BufferInfo(workspace, size, size, step, step))
            write(codegen, workspace)

        return generate_workspace_allocation

    def _measuring(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_note(graph: CompiledFxGraph, inputs: Any) -> Any:
            before = torch.cuda.memory_stats()[f"{REQUESTED}.current"]
            torch.cuda.reset_peak_memory_stats()
            returned = call(graph, inputs)
            requested = torch.cuda.memory_stats()[f"{REQUESTED}.peak"] - before
            is_backward = graph.fx_kwargs["is_backward"]
            planned = self.planned[graph.fx_kwargs["graph_id"], is_backward]
            if is_backward not in self.peaks or planned > self.peaks[is_backward].planned:
                self.peaks[is_backward] = GraphPeak(planned, requested)
            return returned

        return call_and_note


AT_THE_END = -1
"""The last step of a graph's outputs in the timeline."""
REQUESTED = "requested_bytes.all"


def compared(program: Callable[[], Step]) -> tuple[Peaks | None, Peaks, dict[bool, GraphPeak]]:
    """Eager (``None`` where that cannot be simulated), compiled, and what was planned."""
    planning = Planning()
    with planning.going():
        torch._dynamo.reset()
        with simulate("A100-80GB", alloc_conf="", compile="always"):
            step = program()
            compiled = measured(step)
            with planning.measuring():
                step().backward()
    torch._dynamo.reset()
    try:
        with simulate("A100-80GB", alloc_conf="", compile="eager"):
            return measured(program()), compiled, planning.peaks
    except UnsupportedOperatorError:
        return None, compiled, planning.peaks


def written(size: int | None) -> str:
    """In MiB; a dash for what could not be simulated."""
    return "-" if size is None else f"{size / MIB:,.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; all without names")
    names = parser.parse_args().names
    print(f"MiB; torch {torch.__version__}, A100-80GB\n")
    print(
        f"{'':16} {'peak':>18} {'saved':>18} {'beyond':>18}   {'forward':>18} {'backward':>18}\n"
        f"{'':16} "
        + f"{'eager compiled':>18} " * 3
        + "  "
        + f"{'planned requested':>18} " * 2
        + "     s"
    )
    for name, program in PROGRAMS.items():
        if names and not any(part in name for part in names):
            continue
        began = time.perf_counter()
        eager, compiled, graphs = compared(program)
        pairs = (
            (eager.peak if eager else None, compiled.peak),
            (eager.saved if eager else None, compiled.saved),
            (eager.beyond if eager else None, compiled.beyond),
            (graphs[False].planned, graphs[False].requested),
            (graphs[True].planned, graphs[True].requested),
        )
        text = [f"{written(one):>8} {written(other):>9}" for one, other in pairs]
        seconds = time.perf_counter() - began
        print(
            f"{name:16} {text[0]} {text[1]} {text[2]}   {text[3]} {text[4]} {seconds:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
