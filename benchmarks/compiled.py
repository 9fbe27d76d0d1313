"""What torch.compile changes: peaks, saved activations and what comes on top, eager and compiled.

    python benchmarks/compiled.py [NAME...]

Each program runs forward and backward in its third step, gradients kept from the step before, so
that what is there at its start is parameters, gradients and inputs. *Saved* is what a forward pass
leaves for backward, with its output. *Beyond* is how much more the peak needs: temporaries of
forward or backward, less what backward has freed by then. The last columns are the peaks that
Inductor's own memory planning expects of its graphs, forward and backward, and what the same
graphs allocated: `torch._inductor.memory.estimate_peak_memory` of the nodes in their last order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from models import bert_base, classified_text, vit_base
from producers.blocks import DiffusionUNet, LlamaBlock
from producers.vision import resnet50
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._inductor import memory
from torch._inductor.graph import GraphLowering
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._ordered_set import OrderedSet
from training_step import Gpt2

from pytest_gpumem import simulate
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError

MIB = 2**20
STEPS = 3

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Peaks:
    """One step, in bytes beyond what was there at its start."""

    saved: int
    peak: int
    forward: int
    """The peak of the forward pass alone."""
    backward: int
    """What the backward pass needs beyond what was there when it began."""

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


def measured(program: Callable[[], Step]) -> Peaks:
    """The last of some steps."""
    step = program()
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
    return Peaks(saved, max(forward, backward), forward, backward - saved)


# Inductor's own planning.


@contextmanager
def planned() -> Iterator[dict[bool, int]]:
    """What Inductor expects graphs to need, forward (False) and backward, while they are made.

    Beyond the graph's inputs, of which those that are saved for backward end in it. Of a frame that
    is compiled twice, as those are that remember what they were called with, the last one counts.
    """
    expected: dict[bool, int] = {False: 0, True: 0}
    by_frame: dict[tuple[int | None, bool], int] = {}
    codegen = GraphLowering.codegen

    def codegen_and_note(graph: GraphLowering) -> Any:
        made = codegen(graph)
        nodes = graph.scheduler.nodes
        inputs = OrderedSet(graph.graph_inputs)
        ending = {
            name: buffer
            for name, buffer in memory.get_freeable_input_buf(nodes, inputs).items()
            if not name.startswith("primals")
        }
        outputs = OrderedSet(graph.get_output_names())
        peak, _ = memory.estimate_peak_memory(nodes, ending, outputs)
        inside = sum(buffer.mpi_buffer.size_free for buffer in ending.values())
        compiling = CompileContext.current_compile_id()
        frame = compiling.frame_id if compiling is not None else None
        by_frame[frame, graph.is_backward] = peak - inside
        for way in expected:
            expected[way] = sum(one for (_, of), one in by_frame.items() if of is way)
        return made

    with (
        patch.object(GraphLowering, "codegen", codegen_and_note),
        # A plan is only made where code is.
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield expected


def compared(program: Callable[[], Step]) -> tuple[Peaks | None, Peaks, dict[bool, int]]:
    """Eager (``None`` where that cannot be simulated), compiled, and what was planned."""
    with planned() as expected:
        torch._dynamo.reset()
        with simulate("A100-80GB", alloc_conf="", compile="always"):
            compiled = measured(program)
    torch._dynamo.reset()
    try:
        with simulate("A100-80GB", alloc_conf="", compile="eager"):
            return measured(program), compiled, expected
    except UnsupportedOperatorError:
        return None, compiled, expected


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
        + f"{'planned allocated':>18} " * 2
        + "     s"
    )
    for name, program in PROGRAMS.items():
        if names and not any(part in name for part in names):
            continue
        began = time.perf_counter()
        eager, compiled, plan = compared(program)
        pairs = (
            (eager.peak if eager else None, compiled.peak),
            (eager.saved if eager else None, compiled.saved),
            (eager.beyond if eager else None, compiled.beyond),
            (plan[False], compiled.forward),
            (plan[True], compiled.backward),
        )
        text = [f"{written(one):>8} {written(other):>9}" for one, other in pairs]
        seconds = time.perf_counter() - began
        print(
            f"{name:16} {text[0]} {text[1]} {text[2]}   {text[3]} {text[4]} {seconds:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
