"""Memory traces recorded on real GPUs, and the programs that make them under simulation.

The traces are read from $GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository).
An event is an allocation or a free with its requested size.
"""

from __future__ import annotations

import difflib
import io
import lzma
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from producers import (
    cellular_automata,
    compiled_model,
    doubled_rotation,
    einsum_transformer,
    language_model,
    layer_by_layer,
    mixed_model,
    naive_attention,
    quantized_adapters,
    rebuilt_rotation,
    small_models,
)

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.catalogue import find_gpu
from pytest_gpumem.simulated.gpu.replay import replay

ROOT = Path(__file__).resolve().parent.parent
GROUND_TRUTH = Path(os.environ.get("GPUMEM_GROUNDTRUTH", ROOT.parent / "shared" / "groundtruth"))

Event = tuple[str, int]
"""``+`` or ``-``, and the requested bytes."""


@dataclass(frozen=True)
class Trace:
    """One recorded trace and the program that makes it under simulation."""

    file: str
    gpu: str
    torch: str
    run: Callable[[Callable[[], None]], Any]
    """Called with what marks the moment recording began; returns what lives at the end."""
    wsl: bool = False
    """Recorded under WSL 2, where the driver hands out increasing addresses."""
    note: str = ""
    """Why something differs, where it does."""
    elsewhere: int = 0
    """Bytes of the GPU that the allocator cannot have, where the program runs into them."""
    compiling: bool = False
    """Whether torch compiled while the recording ran; what that allocated is left out of it."""


CAST_ORDER = (
    "casts that autocast cached are freed in the order of a hash map of host addresses; the "
    "events are the same"
)

NIU = "NiuHuangxiaozi__assignment2-systems__"
PANDA = "HugePandaCoder__octree-nca-groupeq__"
RTX_4090_CONTEXT = int(0.43 * 2**30)
"""In use outside the allocator, by an error text in a notebook of octree-nca-groupeq d47727a2:
22.81 GiB of the process, of which 20.72 were allocated by PyTorch and 1.66 reserved."""

TRACES = {
    "einsum-forward-100": Trace(
        f"{NIU}forward_memory_snapshot_100",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(100),
        wsl=True,
    ),
    "einsum-forward-200": Trace(
        f"{NIU}forward_memory_snapshot_200",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(200),
        wsl=True,
    ),
    "einsum-forward-200-bf16": Trace(
        f"{NIU}forward_memory_snapshot_200_mixed_precision",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(200, autocast=True),
        wsl=True,
        note=CAST_ORDER,
    ),
    "einsum-training-100": Trace(
        f"{NIU}forward_and_backward_memory_snapshot_100",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.training(100),
        wsl=True,
    ),
    "naive-attention": Trace(
        "silmont2000__assignment2-systems__mem_snapshot",
        "RTX-4060",
        "2.6",
        lambda start: naive_attention.step(),
    ),
    "large-linear": Trace(
        "shreyansh26__MLSys-Experiments__profile_grad",
        "H100",
        "2.6",
        lambda start: small_models.large_linear(),
    ),
    "lm-small-forward": Trace(
        "CliffKai__assignment2-systems__memory_snapshot_small_fwd",
        "H100",
        "2.6",
        lambda start: language_model.step("small", False, start),
    ),
    "lm-medium-training": Trace(
        "CliffKai__assignment2-systems__memory_snapshot_medium_bwd",
        "H100",
        "2.6",
        lambda start: language_model.step("medium", True, start),
    ),
    "lm-small-inference": Trace(
        "Okazaki-Yumemi__CS336__memory_small_forward_128",
        "RTX-4060",
        "2.11",
        lambda start: language_model.inference("small", True, start),
        wsl=True,
    ),
    "lm-medium-inference": Trace(
        "Wedsonlin__assignment2-systems__medium_128_inference_memory_snapshot",
        "RTX-4090",
        "2.11",
        lambda start: language_model.inference("medium", False, start),
        wsl=True,
    ),
    "lm-medium-own-adam": Trace(
        "Wedsonlin__assignment2-systems__medium_128_training_memory_snapshot",
        "RTX-4090",
        "2.11",
        lambda start: language_model.training("medium", start),
        wsl=True,
        note="placement: WSL 2 orders addresses by a rule of its own, here they increase",
    ),
    "lm-2.7b-bf16": Trace(
        "aimetrics__assignment2-systems__memory_2.7b_forward_seq128_bf16",
        "RTX-4090",
        "2.8",
        lambda start: language_model.without_gradients("2.7b", start),
        note=CAST_ORDER,
    ),
    "lm-2.7b-twice": Trace(
        "sidsoc12__spring2024-assignment2-systems__mem_snapshot_ctx128_fp32_infer",
        "H100",
        "2.6",
        lambda start: language_model.twice("2.7b", start),
    ),
    "left-2.7b-training": Trace(
        "kkaitlyn111__cs336-a2-systems__memory_ctx128_fullstep",
        "H100",
        "2.6",
        mixed_model.training,
    ),
    "left-2.7b-bf16": Trace(
        "kkaitlyn111__cs336-a2-systems__memory_ctx256_forward_mixed",
        "H100",
        "2.6",
        mixed_model.forward,
    ),
    "xl-forward-bf16": Trace(
        "notHanmin__assignment2-systems__memory_snapshot_forward",
        "A100-80GB",
        "2.6",
        rebuilt_rotation.forward,
        note=(
            "placement: the recording began after some fifty steps of several runs, the program "
            "here makes two"
        ),
    ),
    "doubled-forward-bf16": Trace(
        "silmont2000__assignment2-systems__memory_forward_bf16_128",
        "RTX-4060",
        "2.6",
        doubled_rotation.forward,
        note=CAST_ORDER,
    ),
    "tiny-steps": Trace(
        "Da1sypetals__tomi__snapshot", "RTX-4060", "2.6", small_models.tiny_steps, wsl=True
    ),
    # Recorded with torch 2.3, 2.5, 2.5, 2.5 and 2.1: the rules are those of 2.6, where need be with
    # what is said in the program.
    "automaton-slide": Trace(
        f"{PANDA}796241__my_snapshot", "RTX-4090", "2.6", cellular_automata.slide
    ),
    "automaton-fused-slide": Trace(
        f"{PANDA}255fc0__my_snapshot", "RTX-4090", "2.6", cellular_automata.fused_slide
    ),
    "automaton-video": Trace(
        f"{PANDA}my_snapshot",
        "RTX-4090",
        "2.6",
        cellular_automata.video,
        elsewhere=RTX_4090_CONTEXT,
    ),
    "layer-by-layer": Trace(
        "MercuryB1__SQAttn__cuda_memory_snapshot", "A100-80GB", "2.6", layer_by_layer.compress
    ),
    "quantized-adapters": Trace(
        "cranberrii__ftcourse__memory_snapshot",
        "A100-40GB",
        "2.6",
        quantized_adapters.forward_and_backward,
        note=(
            "placement: the notebook had loaded and run models before, the program here one of them"
        ),
    ),
}


COMPILED_TRACES = {
    "compiled-training": Trace(
        "bcrafton__assignment2-systems__memory_snapshot",
        "RTX-4090",
        "2.11",
        compiled_model.training,
        note=(
            "recorded with torch 2.10, compiled with the torch that runs. The pass forward, the "
            "loss and the optimizer are equal. In the backward of each layer the gradients of the "
            "two halves that are rotated have buffers of their own in 2.10 (twice 98,304 bytes), "
            "and four to six frees have another place. Of a batch of one, fake tensors of 2.13 "
            "have another stride, so AOTAutograd copies the gradients that enter a graph (one of "
            "12,865,792 bytes, the others of 196,608), also on a GPU"
        ),
    ),
    "compiled-first-forward": Trace(
        "kkaitlyn111__cs336-a2-systems__memory_small_forward",
        "H100",
        "2.6",
        mixed_model.compiled,
        compiling=True,
        note=(
            "recorded with torch 2.6, compiled with the torch that runs. One buffer differs: the "
            "zeros that the rotation fills, 1,572,864 bytes, shared by all layers, which Inductor "
            "of 2.13 folds into what reads them. The peaks differ by placement: "
            "tuning allocated in between"
        ),
    ),
}
"""Made under torch.compile, with the Inductor of other releases than the one that runs."""


def increasing(top: int) -> None:
    """No rule of the driver's: the allocator's own, from a base upwards."""


REPLAYED_ONLY = {
    "Constructor-Sun": "three GPUs; not written anew",
    "Maphsge4": "half of its layers come and go on eight streams; not written anew",
}
"""Recordings, by the beginning of their name, whose programs are not run, and why."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a memory snapshot")


def load(name: str) -> dict[str, Any]:
    """The snapshot called ``name``: dicts, lists, strings and numbers only."""
    with lzma.open(GROUND_TRUTH / "snapshots" / f"{name}.pickle.xz") as file:
        data = file.read()
    snapshot: dict[str, Any] = _Plain(io.BytesIO(data)).load()
    return snapshot


def events(trace: Iterable[Any]) -> list[Event]:
    """Allocations and frees of a trace of dicts or of trace entries."""
    signs = {"alloc": "+", "free_requested": "-"}
    found = []
    for entry in trace:
        action, size = (
            (entry["action"], entry["size"])
            if isinstance(entry, dict)
            else (entry.action, entry.size)
        )
        if action in signs:
            found.append((signs[action], size))
    return found


COMPILING = {"benchmark_all_configs", "joint_graph_passes", "init_gpu_context"}
"""Functions of torch that allocate while it compiles: Triton's configurations are tried out, values
of the graph are folded, and fake tensors see to it that there is a CUDA context."""


def without_compiling(trace: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The trace without what torch allocated while it compiled, and without its frees."""
    left_out = set()
    for entry in trace:
        address = entry["addr"]
        if entry["action"] == "alloc" and not COMPILING.isdisjoint(
            frame["name"] for frame in entry["frames"]
        ):
            left_out.add(address)
        if address not in left_out:
            yield entry
        elif entry["action"] == "free_requested":
            left_out.remove(address)


def differences(recorded: list[Event], simulated: list[Event]) -> list[str]:
    """Every stretch in which the two sequences differ, in words."""
    matcher = difflib.SequenceMatcher(None, recorded, simulated, autojunk=False)
    found = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            there, here = _text(recorded[i:j]), _text(simulated[k:m])
            found.append(f"{i}: recorded {there}, simulated {here}")
    return found


def matching(recorded: list[Event], simulated: list[Event]) -> int:
    """Return the number of events in the same order on both sides."""
    matcher = difflib.SequenceMatcher(None, recorded, simulated, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def _text(stretch: list[Event]) -> str:
    if not stretch:
        return "nothing"
    return " ".join(f"{sign}{size:,}" for sign, size in stretch[:8]) + " ..." * (len(stretch) > 8)


def first_difference(recorded: list[Event], simulated: list[Event]) -> int | None:
    """Index of the first event that differs; ``None`` if all are equal."""
    for index, (one, other) in enumerate(zip(recorded, simulated)):  # noqa: B905  # shorter one counts
        if one != other:
            return index
    return None if len(recorded) == len(simulated) else min(len(recorded), len(simulated))


@dataclass(frozen=True)
class Comparison:
    """One recording beside its program under simulation; peaks are (allocated, reserved) bytes."""

    recorded: list[Event]
    simulated: list[Event]
    recorded_peaks: tuple[int, int]
    simulated_peaks: tuple[int, int]
    seconds: float

    @property
    def first_difference(self) -> int | None:
        """Index of the first event that differs; ``None`` if all are equal."""
        return first_difference(self.recorded, self.simulated)

    @property
    def exact(self) -> bool:
        """Whether every event and both peaks are equal."""
        return self.recorded == self.simulated and self.recorded_peaks == self.simulated_peaks

    @property
    def reordered(self) -> bool:
        """Whether the events differ in their order alone."""
        return sorted(self.recorded) == sorted(self.simulated)


def compare(trace: Trace) -> Comparison:
    """Run the program of ``trace`` and compare."""
    snapshot = load(trace.file)
    started = time.perf_counter()
    with ExitStack() as stack:
        if trace.wsl:
            stack.enter_context(
                patch("pytest_gpumem.simulated.gpu.device.DriverAddresses", increasing)
            )
        model = find_gpu(trace.gpu)
        model = replace(model, total_memory=model.total_memory - trace.elsewhere)
        gpu = stack.enter_context(
            simulate(model, torch_version=trace.torch, alloc_conf="", compile="always")
        )
        began = [0]

        def start() -> None:
            torch.cuda.reset_peak_memory_stats()
            began[0] = len(gpu.trace)

        alive = trace.run(start)
        simulated = events(gpu.trace[began[0] :])
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        del alive
    seconds = time.perf_counter() - started
    longest: list[Any] = max(snapshot["device_traces"], key=len)
    recorded = events(without_compiling(longest) if trace.compiling else longest)
    result = replay(snapshot)
    wanted = result.peak_allocated, result.peak_reserved
    return Comparison(recorded, simulated, wanted, peaks, seconds)
