"""How close simulation comes to recorded GPUs: every comparison, as a table or a page.

    python benchmarks/fidelity.py [-v] [NAME...]      programs against their recorded traces
    python benchmarks/fidelity.py --write PATH        everything, as Markdown (some twenty minutes)

Recordings are read from $GPUMEM_GROUNDTRUTH (default ../shared/groundtruth beside the repository);
they are not part of it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from compiled_numbers import compiled_numbers
from convolutions import convolutions
from folded_tables import folded
from measured_tables import mlp_table, operator_table, usable
from measured_tables import rows as table_rows
from rank_configurations import NOT_RUN
from recordings import (
    COMPILED_TRACES,
    GROUND_TRUTH,
    REPLAYED_ONLY,
    ROOT,
    TRACES,
    Comparison,
    Trace,
    compare,
    differences,
    events,
    load,
    matching,
)
from several_ranks import bounds, rank_numbers
from single_numbers import Number, numbers
from truth_page import section

from pytest_gpumem.simulated.gpu.replay import replay

_INTRODUCTION = 4
"""Lines of the page before its tables: the title, and what the page is."""

SAMPLE = 300
"""Rows of the table of perceptrons that the page compares."""


def print_table(names: list[str], verbose: bool) -> None:
    """Compare the programs whose name contains one of ``names``; all without names."""
    print(
        f"{'trace':26} {'events':>7} {'sim':>7} {'first':>7} {'peak allocated':>14} {'sim':>14} "
        f"{'peak reserved':>14} {'sim':>14} {'s':>6}"
    )
    for name, trace in TRACES.items():
        if names and not any(part in name for part in names):
            continue
        found = compare(trace)
        first = found.first_difference
        (allocated, reserved), (allocated_here, reserved_here) = (
            found.recorded_peaks,
            found.simulated_peaks,
        )
        print(
            f"{name:26} {len(found.recorded):7,} {len(found.simulated):7,} "
            f"{'none' if first is None else first:>7} {allocated:14,} {allocated_here:14,} "
            f"{reserved:14,} {reserved_here:14,} {found.seconds:6.1f}",
            flush=True,
        )
        if verbose and first is not None:
            for line in differences(found.recorded, found.simulated)[:40]:
                print(f"    {line}")


# The page.


def page() -> Iterator[str]:
    """Lines of Markdown."""
    yield "# Fidelity"
    yield ""
    yield (
        "How close the simulated device comes to torch's own CUDA code, and to real GPUs. The "
        "first table is torch's code, run without a GPU. What follows was hardware: recordings "
        "and measurements of other people, from public repositories, which are not part of this "
        f"one, simulated with torch {torch.__version__} "
        "by `python benchmarks/fidelity.py --write docs/fidelity.md`. *Equal* means equal to the "
        "byte; rows that are equal, or within 0.1 %, are counted and not listed."
    )
    for part in _SECTIONS:
        yield ""
        yield from part()


def allocators() -> Iterator[str]:
    """Recorded requests through the simulated allocator."""
    yield "## The allocator alone"
    yield ""
    yield (
        "The requests of a recorded memory snapshot, in their order, through the simulated caching "
        "allocator (`gpumem replay`). *Exact* addresses are those that the real allocator gave; "
        "*all equal* includes segments, statistics and the final layout."
    )
    yield ""
    yield from header("recording", "allocations", "exact addresses", "all equal")
    manifest = json.loads((GROUND_TRUTH / "snapshots" / "MANIFEST.json").read_text())
    exact = total = 0
    for entry in manifest:
        name = entry["file"].removesuffix(".pickle.xz")
        result = replay(load(name))
        exact, total = exact + result.exact_addresses, total + result.total
        yield row(name, result.total, result.exact_addresses, "yes" if result.exact else "no")
    yield row(f"**{len(manifest)} recordings**", total, exact, "")


def programs() -> Iterator[str]:
    """Programs under simulation, event by event."""
    yield "## Programs against their recorded traces"
    yield ""
    yield (
        "The program behind a recording, written anew (`benchmarks/producers`) and run under "
        "simulation: every allocation and free with its size, in order, and the highest bytes "
        "while recording. The rules are those of the torch named, for older recordings the oldest "
        "that is simulated; composite operators are those of the torch that runs. Where a "
        "repository does not name its GPU, the one named has the "
        "compute capability that the trace shows."
    )
    yield ""
    yield from header(
        "program", "GPU, torch", "events", "events equal", "peak allocated", "peak reserved"
    )
    notes: dict[str, list[str]] = defaultdict(list)
    for name, trace in TRACES.items():
        found = compare(trace)
        same, note = verdict(trace, found)
        if note:
            notes[note].append(name)
        yield row(
            name,
            f"{trace.gpu}, {trace.torch}{', WSL 2' if trace.wsl else ''}",
            len(found.recorded),
            same,
            *map(beside, found.recorded_peaks, found.simulated_peaks),
        )
    if notes:
        yield ""
        yield "What differs:"
        yield ""
        yield from (f"- {', '.join(names)}: {note}" for note, names in notes.items())
    yield ""
    yield "Not run as programs, only replayed above:"
    yield ""
    yield from (f"- {name}: {reason}" for name, reason in REPLAYED_ONLY.items())


def verdict(trace: Trace, found: Comparison) -> tuple[str, str]:
    """Return the number of equal events, and the differences."""
    first = found.first_difference
    if first is None:
        return "all", "" if found.exact else trace.note
    if found.reordered:
        return "all, in another order", trace.note
    stretches = differences(found.recorded, found.simulated)
    note = trace.note or f"{len(stretches)} stretches differ, the first at {stretches[0]}"
    return f"up to {first:,}", note


def compiled() -> Iterator[str]:
    """Programs under torch.compile: recordings, and numbers that others printed."""
    yield "## Compiled code"
    yield ""
    yield (
        "Programs under `torch.compile`, run with the Inductor of the torch that made this page; "
        "rules are those of the release recorded or measured. Two recordings: every allocation "
        "and free, but for what torch allocated for a moment while it compiled. *Equal* are those "
        "that stand in the same order on both sides."
    )
    yield ""
    yield from header("program", "events", "while compiling", "compared", "equal", "peak allocated")
    notes = []
    for name, trace in COMPILED_TRACES.items():
        found = compare(trace)
        whole = max(len(events(each)) for each in load(trace.file)["device_traces"])
        equal = matching(found.recorded, found.simulated)
        yield row(
            name,
            whole,
            whole - len(found.recorded),
            len(found.recorded),
            f"{equal:,} ({equal / len(found.recorded):.1%})",
            beside(found.recorded_peaks[0], found.simulated_peaks[0]),
        )
        notes.append(f"- {name}: {trace.note}.")
    yield ""
    yield from notes
    yield ""
    numbers = list(compiled_numbers())
    exact = sum(not number.off for number in numbers)
    yield (
        f"What others printed: {exact} of {len(numbers)} numbers are equal to the precision "
        "printed. Budgets of activation memory take some minutes more: "
        "`python benchmarks/compiled_numbers.py budgets`."
    )
    yield ""
    yield from header("what", "source", "measured", "simulated", "off", "not compiled", "")
    for number in numbers:
        yield row(
            number.what,
            number.source,
            number.written(number.measured),
            number.written(number.simulated) if number.off else "equal",
            percent(number.off),
            number.written(number.eager),
            number.note,
        )


def compiling() -> Iterator[str]:
    """Programs compiled and not, and what Inductor's own planning expects of them."""
    yield "## What compiling changes"
    yield ""
    yield (
        "Neither torch's code nor hardware stands beside these: the same step of training, eager "
        "and compiled, and the peaks that Inductor's own planning expects of its graphs beside "
        "what their wrappers requested, from call to return. *Saved* is what a forward pass leaves "
        "for backward, *beyond* how much more the peak needs. The plan does not know which buffers "
        "are one in a kernel that writes once (MLP), what libraries take (attention in Llama, "
        "cuDNN in the U-Net), what a saved view keeps (BERT, ViT), weights that are copied to "
        "channels last (ResNet-50), and padded rows (GPT-2's 50,257 logits are 50,304 wide)."
    )
    yield ""
    yield from printed_by("compiled.py")


def perceptrons() -> Iterator[str]:
    """nvidia-smi while perceptrons train."""
    table = mlp_table(SAMPLE)
    every = sum(usable(each) for each in table_rows("gpumemnet_mlp.csv"))
    yield "## 300 training runs against nvidia-smi"
    yield ""
    yield (
        "Perceptrons of random shape trained for a minute with Adam on an A100 "
        "(itu-rad/GPUMemNet): the highest `memory.used` beside simulated reserved memory plus one "
        f"constant, {table.context:.0f} MiB of CUDA context, over a random sample of "
        f"{len(table.rows)} of {every:,} rows that did not fail."
    )
    yield ""
    yield from header("", "share of rows")
    yield row("equal to the MiB", f"{table.within(0):.1%}")
    yield row("within 2 MiB", f"{table.within(2):.1%}")
    yield row("within 20 MiB", f"{table.within(20):.1%}")
    yield ""
    yield (
        f"Median error {statistics.median(table.errors):.0f} MiB, 95th percentile "
        f"{table.percentile(0.95):.0f} MiB, largest {table.errors[-1]:.0f} MiB."
    )


def operators() -> Iterator[str]:
    """Peak allocated of single operators."""
    found = list(operator_table())
    equal = sum(same for *_, same in found)
    yield "## Single operators"
    yield ""
    yield (
        "Peak allocated of one PyTorch operator or module (the torch rows of Liger-Kernel's "
        f"benchmark), in MiB: {equal} of {len(found)} equal to the precision on record, that of "
        "32-bit floats, which is the byte below 16 GiB."
    )
    yield ""
    yield from header("operator", "mode", "size", "GPU", "measured", "simulated")
    for each, simulated, same in found:
        text = f"{simulated:.4f}" if not same else "equal"
        yield row(each["operator"], each["mode"], each["x"], each["gpu"], each["peak_mib"], text)


def single() -> Iterator[str]:
    """Numbers stated on their own."""
    yield "## Single numbers"
    yield ""
    yield from number_table(numbers())


def layers() -> Iterator[str]:
    """Peaks of single convolutions and of a model of convolutions."""
    found = list(convolutions())
    equal = sum(not number.off for number in found)
    within = sum(abs(number.off) <= 0.001 for number in found)
    yield "## Convolutions in half precision"
    yield ""
    yield (
        "What others printed for single convolutions and for an autoencoder; cuDNN's workspace is "
        "in every peak. A few rows are float32. "
        f"{equal} of {len(found)} rows are equal to the precision printed, {within} within 0.1 %. "
        "The rule for halves was made from the first ten rows; that three channels take nothing is "
        "what the encoder's reserved memory says. Nothing was made from the others."
    )
    yield ""
    yield from number_table(found)


def ranks() -> Iterator[str]:
    """Yield the table of public measurements on one rank of several."""
    configurations = list(rank_numbers())
    found = [number for numbers_there in configurations for number in numbers_there]
    equal = sum(not number.off for number in found)
    within = sum(abs(number.off) <= 0.01 for number in found)
    yield "## One rank of several"
    yield ""
    yield (
        "What others measured on one rank of a world of several: DDP, FSDP1 and FSDP2, sharded "
        "optimizers, tensor and pipeline parallelism. The programs are written anew after theirs "
        "(`benchmarks/producers`) and run under `simulate(..., world_size=, rank=)`; nothing in "
        "them was made to fit a number. Two sources name no GPU, the public notes and the second "
        "CS336: the workspaces in their totals are not a Hopper's, so it is an A100 here. "
        f"Of {len(found)} numbers in {len(configurations)} "
        f"configurations {equal} are equal to the precision printed and {within} within 1 %. "
        "The composition of FSDP, DTensor and DDP is the installed torch's, whichever torch was "
        "measured."
    )
    yield ""
    yield from number_table(found)
    yield ""
    yield (
        "The upper bounds that PyTorch's own test of FSDP2 asserts "
        "(test/distributed/_composable/fsdp/test_fully_shard_memory.py), in MB above what was "
        "there before:"
    )
    yield ""
    yield from header("case", "point", "asserted at most", "simulated", "")
    for name, point, bound, simulated in bounds():
        note = "" if simulated <= bound else _ABOVE
        yield row(name, point, f"{bound:.1f}", f"{simulated:.0f}", note)
    yield ""
    yield "Not run:"
    yield ""
    yield from (f"- {name}: {reason}" for name, reason in NOT_RUN.items())


_ABOVE = (
    "above, from a clean start as here; the test's cases follow one another in a process, and the "
    "peak that one leaves is what the next starts from"
)


def number_table(found: Iterable[Number]) -> Iterator[str]:
    """Measured and simulated numbers."""
    yield from header("what", "source", "measured", "simulated", "off", "")
    for number in found:
        yield row(
            number.what,
            number.source,
            number.written(number.measured),
            number.written(number.simulated) if number.off else "equal",
            percent(number.off),
            number.note,
        )


def percent(off: float) -> str:
    """A difference with as many digits as show it; nothing for none."""
    if not off:
        return ""
    return f"{off:+.1%}" if abs(off) >= 0.0005 else f"{off:+.2%}"


def speed() -> Iterator[str]:
    """Yield the output of the other benchmarks."""
    yield "## Speed"
    for script in ("training_step.py", "large_model.py"):
        yield ""
        yield from printed_by(script)


def printed_by(script: str) -> Iterator[str]:
    """Yield the output of another benchmark, under its command."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script)],
        capture_output=True,
        text=True,
        check=True,
    )
    yield f"`python benchmarks/{script}`"
    yield ""
    yield "```text"
    yield from done.stdout.rstrip().splitlines()
    yield "```"


def unmatched() -> Iterator[str]:
    """Known differences and their causes."""
    yield "## Known not to match"
    yield ""
    yield from (f"- {line}" for line in _UNMATCHED)


_UNMATCHED = (
    "Ties between free blocks of one size are broken by address, and the driver's addresses are a "
    "model read from recordings of Linux (32 MiB ranges downwards). An H100 also gave freed ranges "
    "out again, some allocations later; the model is of a new process, and never does. Reserved "
    "memory can be off by a segment, allocated memory by the unsplit rest of a block.",
    "Composite operators run as the installed torch takes them apart: `einsum` of torch 2.6 and of "
    "2.13 order the operands of their product differently, which decides layouts and with them "
    "buffers of reductions.",
    "cuDNN's workspaces of convolutions are estimates, reported as such: image models trained in "
    "large batches are off by what cuDNN chose, on an H100 by 0.3 % on average in float32 and "
    "0.6 % under autocast (12 networks of torchvision), single convolutions by 20 %.",
    "The CUDA context, and what lies outside the allocator, is not simulated.",
)


_SECTIONS = (
    allocators,
    programs,
    compiled,
    compiling,
    perceptrons,
    operators,
    layers,
    single,
    ranks,
    speed,
    unmatched,
)


def header(*names: str) -> Iterable[str]:
    """The first two lines of a table."""
    return row(*names), row(*("---" for _ in names))


def row(*cells: object) -> str:
    """One line of a table."""
    return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |"


def beside(recorded: int, simulated: int) -> str:
    """``equal``, or both numbers and how far they are apart."""
    if recorded == simulated:
        return f"{recorded:,}, equal"
    return f"{recorded:,}, simulated {simulated:,} ({simulated / recorded - 1:+.3%})"


def main() -> None:
    """Print a table or write the page."""
    arguments = sys.argv[1:]
    if "--write" in arguments:
        target = Path(arguments[arguments.index("--write") + 1])
        lines = list(folded(page()))
        kept = section(target.read_text(encoding="utf-8")) if target.exists() else ""
        if kept:
            lines[_INTRODUCTION:_INTRODUCTION] = [kept, ""]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    print_table([name for name in arguments if not name.startswith("-")], "-v" in arguments)


if __name__ == "__main__":
    main()
