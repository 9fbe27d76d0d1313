"""What others measured on one rank of several, where they say it, and the program that does it.

Only configurations whose code is public and small enough to write anew, and whose numbers came
from torch's allocator. ``NOT_RUN`` says of others why they are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from producers import megatron, replicated, sharded_tests, titan
from torch import nn

from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_gpu

GIB = 2**30
UNITS: dict[str, float] = {
    "bytes": 1,
    "MB": 10**6,
    "MiB": 2**20,
    "GiB": GIB,
    "% of 95.04 GiB": 95.0396 * GIB / 100,
}


@dataclass(frozen=True)
class Stated:
    """A number as its source prints it."""

    point: str
    value: float
    cause: str = ""
    """Why the simulated one is another, where it is."""


@dataclass(frozen=True)
class Configuration:
    """A published run."""

    what: str
    source: str
    gpu: str | GpuModel
    ranks: int
    program: Callable[[], Sequence[int]]
    """Runs one rank; returns bytes for each of ``stated``."""
    stated: tuple[Stated, ...]
    unit: str = "bytes"
    digits: int = 0
    floors: bool = False
    """Whether the source cuts digits off instead of rounding."""
    measured: tuple[int, ...] = (0,)
    """The ranks that the number is of; of several it is their mean."""
    release: str = "2.6"
    settings: str = ""
    workspaces: str | None = None
    """CUBLAS_WORKSPACE_CONFIG."""


# pytorch/tutorials.

_RECIPE = "pytorch/tutorials, recipes_source/zero_redundancy_optimizer.rst"
_POINTS = ("local model", "DDP", "before step()", "after step()")
RECIPE = tuple(
    Configuration(
        f"20 layers of 2000, DDP, {name}",
        _RECIPE,
        "A100-40GB",
        2,
        partial(replicated.recipe, zero),
        tuple(map(Stated, _POINTS, values, ("", "", "tails of blocks", ""))),
        "MB",
        floors=True,
        # Workspaces were cuBLAS's own.
        workspaces=":0:0",
    )
    for name, zero, values in (
        ("ZeroRedundancyOptimizer", True, (335, 656, 992, 1361)),
        ("Adam", False, (335, 656, 992, 1697)),
    )
)

# "Notes on FSDP": six layers of 8192, batch 256, Adam. No GPU is stated; a Hopper's workspaces
# would be larger than what is left of the totals.


def _perceptron(kind: str) -> list[int]:
    return [replicated.perceptron(kind)]


NOTES = tuple(
    Configuration(
        f"six layers of 8192, batch 256, Adam, {kind}",
        "public notes on FSDP, ddp_vs_fsdp.py",
        "A100-80GB",
        4,
        partial(_perceptron, kind),
        (Stated("peak allocated", value),),
        "MiB",
        floors=True,
    )
    for kind, value in (("DDP", 9265), ("FSDP1", 2496), ("FSDP2", 2504))
)

# Optimizers divided by hand: Stanford CS336, assignment 2, two billion parameters.

_TAILS = "tails of blocks, which settle over more steps than are run here"
DIVIDED = tuple(
    Configuration(
        f"CS336 xl, batch 16 x 128, {name} AdamW",
        "brandon-snider/cs336-a2 49cf3d4a, writeup.typ",
        "H100",
        2,
        partial(replicated.first, divided, 3),
        (
            Stated("after init", 7804.65),
            Stated("peak before step", before, _TAILS),
            Stated("peak of step", after, _TAILS),
        ),
        "MiB",
        2,
        measured=(0, 1) if divided else (0,),
    )
    for name, divided, before, after in (
        ("sharded", True, 26312.84, 23723.84),
        ("plain", False, 34104.87, 31564.80),
    )
) + tuple(
    Configuration(
        f"CS336 xl, batch 4 x {length}, {'sharded' if divided else 'plain'} AdamW",
        "damek/cs336-assignment2-systems 749e9687, outputs/optimizer_state_sharding_accounting.md",
        # The workspaces of its totals are not a Hopper's.
        "A100-80GB",
        2,
        partial(replicated.second, length, divided),
        (Stated("after init", init), Stated("before step", value), Stated("after step", value)),
        "GiB",
        4,
        settings="expandable_segments:True",
    )
    for length, init, sharded, plain in (
        (128, 7.4441, 22.4767, 29.8016),
        (512, 7.4442, 22.5055, 29.8303),
    )
    for divided, value in ((True, sharded), (False, plain))
)

# PyTorch's test of FSDP1: what it was read off as, to 1 MiB.


def _flat(checkpoints: bool) -> Configuration:
    expected = {
        point: value
        for point, value in sharded_tests.flat_expected(checkpoints).items()
        if point.endswith(("fwd", "bwd", "step"))
    }

    def run() -> list[int]:
        found = sharded_tests.flat(checkpoints)
        return [found[point] * 2**20 for point in expected]

    return Configuration(
        f"convolutions, FSDP1, {'checkpoints' if checkpoints else 'no checkpoints'}",
        "pytorch/pytorch, test/distributed/fsdp/test_fsdp_memory.py",
        "A100-40GB",
        2,
        run,
        tuple(Stated(point, value) for point, value in expected.items()),
        "MiB",
    )


FLAT = tuple(map(_flat, (False, True)))

# torchtitan, eight H100s of 95 GiB.

_TITAN = "pytorch/torchtitan#{}, its merge commit's message"
_H100 = replace(find_gpu("H100"), total_memory=int(95.0396 * GIB))
_LLAMA_3 = titan.Run(titan.LLAMA_3_8B, "op")
_LLAMA_2 = titan.Run(titan.LLAMA_2_7B, "full")
_WIDE = replace(_LLAMA_2, sizes=replace(titan.LLAMA_2_7B, batch=16), tensor=2)
_CHUNKS = (
    "what the merge adds is called nowhere; 42.26 where the loop stands in the training step, so "
    "that the logits and the last chunk in float32 live through the backward pass"
)
_ROOT = "0.49 GiB, the root group's parameters in bfloat16 once more: FSDP2 of a March 2024 nightly"
_FRAGMENTS = "the same 0.49 GiB, and fragments of segments that cannot expand"
_AGAIN = "#985 and #996 state 49.58 of the same run"
_TIMED = "FSDP1 frees with record_stream: when a block comes back depends on the GPU's pace"
_RUNS_AHEAD = (
    "before torch 2.8 what tensor-parallel collectives use stays until the GPU gets there "
    "(recordStream), and FSDP2 lets the host run ahead: pytorch/torchtitan#735, #191"
)


def _reserved(run: titan.Run) -> list[int]:
    """Highest reserved bytes of the model, the first step and a later one."""
    return [reserved for _, reserved in titan.train(run, 2)]


def _last(run: titan.Run) -> tuple[int, int]:
    """Highest active and reserved bytes of a later step."""
    return titan.train(run, 2)[-1]


def _later(run: titan.Run) -> list[int]:
    """Highest reserved bytes of a later step."""
    return [_last(run)[1]]


def _norm(width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5)


TITAN_LOGS = tuple(
    Configuration(
        f"Llama 3 8B, FSDP2, selective checkpoints, {name}",
        _TITAN.format(822),
        _H100,
        8,
        partial(_reserved, replace(_LLAMA_3, reshard=policy)),
        (
            Stated("model", 3.77),
            Stated("step 1, reserved", first),
            Stated("later, reserved", later, _AGAIN),
        ),
        "GiB",
        2,
        settings="expandable_segments:True",
    )
    for name, policy, first, later in (
        ("reshard: default", "default", 42.08, 49.59),
        ("reshard: always", "always", 41.89, 49.41),
        ("reshard: never", "never", 54.66, 62.18),
    )
) + tuple(
    Configuration(
        f"Llama 3 8B, FSDP2, selective checkpoints, {name}",
        _TITAN.format(pull),
        _H100,
        8,
        partial(_later, run),
        (Stated("later, reserved", value, cause),),
        "GiB",
        2,
        settings="expandable_segments:True",
    )
    for name, pull, run, value, cause in (
        ("nn.RMSNorm", 985, replace(_LLAMA_3, norm=_norm), 49.66, ""),
        ("loss by chunks", 996, replace(_LLAMA_3, loss=titan.chunked), 42.26, _CHUNKS),
    )
)
TITAN_SHARES = tuple(
    Configuration(
        f"Llama 2 7B, {name}",
        _TITAN.format(165),
        _H100,
        8,
        partial(_last, run),
        (
            Stated("peak active", active, causes[0]),
            Stated("peak reserved", reserved, causes[1]),
        ),
        "% of 95.04 GiB",
        2,
    )
    for name, run, active, reserved, causes in (
        ("FSDP1, checkpoints", replace(_LLAMA_2, flat=True), 24.81, 33.82, (_TIMED,) * 2),
        (
            "FSDP1, selective",
            replace(_LLAMA_2, flat=True, checkpoints="op"),
            52.98,
            67.23,
            (_TIMED,) * 2,
        ),
        ("FSDP2, checkpoints", _LLAMA_2, 23.92, 32.64, (_ROOT, _FRAGMENTS)),
        (
            "FSDP2, selective",
            replace(_LLAMA_2, checkpoints="op"),
            52.13,
            62.51,
            (_ROOT, _FRAGMENTS),
        ),
        ("FSDP2 x 2-way TP, checkpoints", _WIDE, 50.12, 60.97, (_RUNS_AHEAD,) * 2),
        (
            "FSDP2 x 2-way TP, selective",
            replace(_WIDE, checkpoints="op"),
            76.49,
            90.14,
            (_RUNS_AHEAD,) * 2,
        ),
    )
)

# Megatron-LM's golden values: the last rank of eight.

_GOLDEN = "NVIDIA/Megatron-LM d98e8a64, tests/functional_tests/test_cases/gpt/gpt3_mcore_{}"
_HALVES: dict[str, Any] = {"dtype": torch.float16, "fused": False}
_BLOCKS = "tails of blocks: for one test the containers' own values differ by up to 8.5 MB"


def _golden(layout: megatron.Layout, overflows: int = 0) -> list[int]:
    """Allocated after the last step, the peak after the first, and the peak."""
    seen = list(megatron.train(layout, 2 + overflows, overflows))
    return [seen[-1][0], seen[0][1], seen[-1][1]]


MEGATRON = tuple(
    Configuration(
        f"GPT, 12 layers of 512, {name}",
        _GOLDEN.format(test),
        gpu,
        8,
        partial(_golden, megatron.Layout(tensor, pipeline, **options), overflows),
        tuple(
            Stated(point, value, _BLOCKS)
            for point, value in zip(("allocated", "peak, step 1", "peak"), values, strict=True)
        ),
        measured=(7,),
        release="2.8",
        workspaces=":4096:8",
    )
    for name, test, gpu, tensor, pipeline, options, overflows, values in (
        (
            "TP 4, A100",
            "tp4_pp1",
            "A100-80GB",
            4,
            1,
            {},
            0,
            (382_956_544, 1_497_803_264, 1_628_741_632),
        ),
        (
            "PP 2, A100",
            "tp1_pp2",
            "A100-80GB",
            1,
            2,
            {},
            0,
            (948_653_056, 3_275_284_480, 3_632_653_312),
        ),
        (
            "PP 2, H100",
            "tp1_pp2",
            "H100",
            1,
            2,
            {},
            0,
            (948_653_056, 3_276_857_344, 3_633_177_600),
        ),
        (
            "PP 4, A100",
            "tp1_pp4",
            "A100-80GB",
            1,
            4,
            {},
            0,
            (782_094_336, 2_462_767_104, 2_748_673_024),
        ),
        (
            "PP 4, H100",
            "tp1_pp4",
            "H100",
            1,
            4,
            {},
            0,
            (778_948_608, 2_462_767_104, 2_746_575_872),
        ),
        (
            "TP 2 x PP 2, float16, torch alone",
            "tp2_pp2_uninstall_te",
            "A100-80GB",
            2,
            2,
            _HALVES,
            1,
            (560_548_864, 1_905_351_680, 2_086_473_728),
        ),
    )
)

CONFIGURATIONS: tuple[Configuration, ...] = (
    *RECIPE,
    *NOTES,
    *DIVIDED,
    *FLAT,
    *TITAN_LOGS,
    *TITAN_SHARES,
    *MEGATRON,
)

BOUNDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resharded after the forward pass", {"reshard": True}),
    ("not resharded", {"reshard": False}),
)
"""Cases of test/distributed/_composable/fsdp/test_fully_shard_memory.py."""

NOT_RUN = {
    "pytorch/pytorch, test_fully_shard_memory.py, parameters on the host": (
        "FSDP2 compares addresses of the host's storages, which a simulated GPU does not fill"
    ),
    "pytorch/torchtitan, benchmarks/*.md and the memory columns of later pull requests": (
        "compiled, or in float8"
    ),
    "pytorch/torchtitan#887 (36.06 GiB, scaled dot product attention)": (
        "how many A100s shared the model is not stated"
    ),
    "pytorch/torchtitan#735 (FSDP1 against FSDP2, memory summaries)": "the model is not public",
    "pytorch/pytorch#104589, #82001, #108976": "the numbers are in pictures",
    "pytorch/pytorch#41954 (DDP's views of buckets: 8250 to 7183 MB)": (
        "batch, sequence and torch of RoBERTa's run are not stated"
    ),
    "pytorch/pytorch#124260 (FSDP1's wrapping of Llama 2 70B)": (
        "measured on Intel's GPUs, whose allocator is another"
    ),
    "intel/torch-xpu-ops#1792 (a 3B model on two and four A100s)": (
        "the batches are those of a data set"
    ),
    "huggingface/accelerate#3474, #3844 (LoRA under FSDP2)": (
        "needs the weights of a released model, and the second is pictures"
    ),
    "facebookresearch/fairscale#627, #642": "fairscale's FSDP, which torch's replaced",
    "nanotron's old_bench (1B Llama by dp, tp, pp)": (
        "needs flash-attn's kernels, and the version of nanotron that ran is not stated"
    ),
    "NVIDIA/Megatron-LM, golden values without transformer_impl: local": (
        "Transformer Engine's modules, which keep what they do not say"
    ),
}
