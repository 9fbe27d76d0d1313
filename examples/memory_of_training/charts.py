"""``python -m examples.memory_of_training.charts FOLDER``: the experiments as tables and charts.

The tables (CSV) need nothing more; the charts (PNG) need matplotlib, which the extra ``examples``
brings.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.memory_of_training.closed_form import CATEGORIES
from examples.memory_of_training.tables import Table, all_tables
from examples.memory_of_training.timelines import SEGMENTS
from pytest_gpumem import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE, ACCENT = "#24292f", "#6e7781", "#d0d7de", "#d1495b"
COLOURS = dict(
    zip(CATEGORIES, ("#30638e", "#a1c6ea", "#76a665", "#edae49", "#8d6a9f", "#c96a4b"), strict=True)
)
SEGMENT_COLOURS = {
    "kept": COLOURS["trainable_params"],
    "gradient": COLOURS["gradient"],
    "intermediate_tensors": COLOURS["intermediate_tensors"],
    "optimizer_state": COLOURS["optimizer_state"],
    "temporary": PALE,
}
PHASES = {"zero_grad": "#f3f4f6", "forward": "#e3eef9", "backward": "#fbeed5", "step": "#f7e0dc"}
NO_WORKSPACE = ":0:0"

Tables = Mapping[str, Table]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all tables, and all charts where matplotlib is installed; print their paths."""
    parser = ArgumentParser(prog="python -m examples.memory_of_training.charts")
    parser.add_argument("folder", type=Path, help="where the files go; made if it is not there")
    parser.add_argument("--cuda", action="store_true", help="measure on this machine's GPU")
    options = parser.parse_args(arguments)
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda: torch sees no CUDA device; leave it out to simulate a T4")

    with real_gpu() if options.cuda else simulated_gpu() as name:
        tables = {table.name: table for table in all_tables()}
    options.folder.mkdir(parents=True, exist_ok=True)
    for table in tables.values():
        print(table.write(options.folder))
    if find_spec("matplotlib") is None:
        print("no charts: matplotlib is missing (pip install 'pytest-gpumem[examples]')")
        return
    for path in draw(tables, name, options.folder):
        print(path)


@contextmanager
def simulated_gpu() -> Iterator[str]:
    """Simulate the GPU of the recorded numbers; yield its name."""
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=NO_WORKSPACE):
        yield "simulated T4, whose clock counts events"


@contextmanager
def real_gpu() -> Iterator[str]:
    """Prevent cuBLAS from taking workspaces, which it decides on its first use."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = NO_WORKSPACE
    yield torch.cuda.get_device_name()


def draw(tables: dict[str, Table], device: str, folder: Path) -> Iterator[Path]:
    """Draw every chart; yield the paths."""
    from matplotlib.figure import Figure

    for fill, size in CHARTS.items():
        figure = Figure(figsize=size, layout="constrained")
        fill(figure, tables)
        figure.supxlabel(device, fontsize=8, color=GREY, x=0.99, ha="right")
        path = folder / f"{fill.__name__}.png"
        figure.savefig(path, dpi=120)
        yield path


def bytes_per_element(figure: Figure, tables: Tables) -> None:
    """Draw bars of the bytes of one element of each dtype."""
    axes = _axes(figure.subplots(), "Bytes per element")
    names, sizes = zip(*tables["bytes_per_element"].rows, strict=True)
    bars = axes.bar(names, sizes, color=COLOURS["trainable_params"], width=0.65)
    axes.bar_label(bars, fmt="%d", color=INK, padding=2)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def blocks_of_512_bytes(figure: Figure, tables: Tables) -> None:
    """Draw a staircase of allocated bytes over requested bytes."""
    axes = _axes(figure.subplots(), "Memory is allocated in blocks of 512 bytes")
    counts, requested, taken = zip(*tables["blocks_of_512_bytes"].rows, strict=True)
    axes.step(counts, taken, where="post", color=COLOURS["trainable_params"], label="allocated")
    axes.plot(counts, requested, color=ACCENT, linewidth=1, linestyle="--", label="requested")
    axes.annotate(
        "800 elements: 3,200 bytes requested,\n3,584 allocated (7 blocks)",
        (800, taken[800]),
        (330, 3900),
        arrowprops={"arrowstyle": "-", "color": INK},
        color=INK,
    )
    axes.set(xlabel="elements of a float32 tensor", ylabel="bytes", xlim=(0, 1049), ylim=(0, 4800))
    axes.set_yticks(range(0, 4609, 512))
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")


def training(figure: Figure, tables: Tables) -> None:
    """Draw stacked bars of predictions, and marks for measurements."""
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, optimizer in zip(panels, ("SGD", "Adam"), strict=True):
        _axes(axes, f"Training Linear(256, 250) with {optimizer}, batch of 100")
        rows = tables[f"training_with_{optimizer.lower()}"].rows
        events, *held, _, measured = zip(*rows, strict=True)
        bottom = [0.0] * len(events)
        for category, sizes in zip(CATEGORIES, held, strict=True):
            kilobytes = _kilobytes(sizes)
            if any(kilobytes):
                label = f"predicted {category.replace('_', ' ')}"
                axes.bar(events, kilobytes, 0.7, bottom, color=COLOURS[category], label=label)
            bottom = [sum(pair) for pair in zip(bottom, kilobytes, strict=True)]
        axes.scatter(
            events,
            _kilobytes(measured),
            marker="_",
            s=420,
            color=INK,
            label="measured total",
            zorder=3,
        )
        axes.set_ylabel("KiB allocated")
        axes.margins(x=0.01, y=0.08)
        axes.grid(axis="y", color=PALE, linewidth=0.6)
    panels[-1].tick_params(axis="x", labelrotation=40)
    for label in panels[-1].get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")
    handles, labels = panels[-1].get_legend_handles_labels()
    mark, *bars = zip(handles, labels, strict=True)
    figure.legend(
        *zip(*bars, mark, strict=True), frameon=False, ncols=3, loc="outside upper center"
    )


def one_step_with_adam(figure: Figure, tables: Tables) -> None:
    """Memory between the events, by what it is for: every allocation and free of one step."""
    axes = _axes(figure.subplots(), "One training step with Adam, every allocation and free")
    rows = tables["one_step_with_adam"].rows
    times, _, *segments, taken = zip(*rows, strict=True)
    kilobytes = _kilobytes(taken)
    bottom = [0.0] * len(times)
    for name, sizes in zip(SEGMENTS, segments, strict=True):
        top = [sum(pair) for pair in zip(bottom, _kilobytes(sizes), strict=True)]
        if top != bottom:
            label = name.replace("_", " ")
            axes.fill_between(
                times, bottom, top, step="post", color=SEGMENT_COLOURS[name], label=label
            )
        bottom = top
    axes.step(times, kilobytes, where="post", color=INK, linewidth=0.8)
    figure.legend(frameon=False, ncols=len(SEGMENTS), loc="outside lower center")
    axes.set(xlabel="milliseconds", ylabel="KiB allocated", xlim=(times[0], times[-1]))
    axes.set_ylim(0, max(kilobytes) * 1.15)
    starts = {phase: float(next(moments)[0]) for phase, moments in groupby(rows, key=itemgetter(1))}
    ends = [*starts.values(), times[-1]][1:]
    for (phase, start), end in zip(starts.items(), ends, strict=True):
        colour = PHASES[phase]
        axes.axvspan(start, end, color=colour, linewidth=0, zorder=0)
        axes.text((start + end) / 2, max(kilobytes) * 1.08, phase, ha="center", color=INK)


CHARTS = {
    bytes_per_element: (7, 4),
    blocks_of_512_bytes: (7, 4),
    training: (11, 8),
    one_step_with_adam: (11, 4.5),
}
"""Size of each, in inches."""


def _axes(axes: Axes, title: str) -> Axes:
    axes.set_title(title, loc="left", pad=10, fontsize=11, color=INK, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return axes


def _kilobytes(sizes: Sequence[Any]) -> list[float]:
    return [size / 1024 for size in sizes]


if __name__ == "__main__":
    main()
