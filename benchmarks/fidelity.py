"""Recorded GPU traces against the same programs under simulation, event by event.

    python benchmarks/fidelity.py [NAME...]

The traces are read from $GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository).
An event is an allocation or a free with its requested size.
"""

from __future__ import annotations

import difflib
import io
import lzma
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from producers import einsum_transformer, lm_step, naive_attention, small_models

from pytest_gpumem import simulate
from pytest_gpumem.simulated.allocator.replay import replay

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


NIU = "NiuHuangxiaozi__assignment2-systems__"

TRACES = {
    "einsum-forward-100": Trace(
        f"{NIU}forward_memory_snapshot_100",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(100),
    ),
    "einsum-forward-200": Trace(
        f"{NIU}forward_memory_snapshot_200",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(200),
    ),
    "einsum-forward-200-bf16": Trace(
        f"{NIU}forward_memory_snapshot_200_mixed_precision",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.forward(200, autocast=True),
    ),
    "einsum-training-100": Trace(
        f"{NIU}forward_and_backward_memory_snapshot_100",
        "RTX-4060",
        "2.6",
        lambda start: einsum_transformer.training(100),
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
        lambda start: lm_step.step("small", False, start),
    ),
    "lm-medium-training": Trace(
        "CliffKai__assignment2-systems__memory_snapshot_medium_bwd",
        "H100",
        "2.6",
        lambda start: lm_step.step("medium", True, start),
    ),
    "tiny-steps": Trace("Da1sypetals__tomi__snapshot", "RTX-4060", "2.6", small_models.tiny_steps),
}


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


def differences(recorded: list[Event], simulated: list[Event]) -> list[str]:
    """Every stretch in which the two sequences differ, in words."""
    matcher = difflib.SequenceMatcher(None, recorded, simulated, autojunk=False)
    found = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            found.append(f"{i}: recorded {_text(recorded[i:j])}, simulated {_text(simulated[k:m])}")
    return found


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


def compare(name: str, trace: Trace, verbose: bool) -> str:
    """One row of the table, and with ``verbose`` the differences below it."""
    snapshot = load(trace.file)
    recorded = max(snapshot["device_traces"], key=len)
    started = time.perf_counter()
    with simulate(trace.gpu, torch_version=trace.torch, alloc_conf="") as gpu:
        began = [0]
        alive = trace.run(lambda: began.__setitem__(0, len(gpu.trace)))
        simulated = events(gpu.trace[began[0] :])
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        del alive
    seconds = time.perf_counter() - started
    wanted = events(recorded)
    first = first_difference(wanted, simulated)
    result = replay(snapshot)
    wanted_peak = result.peak_allocated, result.peak_reserved
    row = (
        f"{name:26} {len(wanted):7,} {len(simulated):7,} {'none' if first is None else first:>7} "
        f"{wanted_peak[0]:14,} {peak[0]:14,} {wanted_peak[1]:14,} {peak[1]:14,} {seconds:6.1f}"
    )
    if verbose and first is not None:
        row += "".join(f"\n    {line}" for line in differences(wanted, simulated)[:40])
    return row


def main() -> None:
    """Print the table."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    print(
        f"{'trace':26} {'events':>7} {'sim':>7} {'first':>7} {'peak allocated':>14} {'sim':>14} "
        f"{'peak reserved':>14} {'sim':>14} {'s':>6}"
    )
    for name, trace in TRACES.items():
        if not names or any(part in name for part in names):
            print(compare(name, trace, "-v" in sys.argv), flush=True)


if __name__ == "__main__":
    main()
