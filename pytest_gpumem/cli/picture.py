"""``gpumem report --to png``: a picture of a run's measurements, for a paper or a pull request."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.history import CATEGORIES
from pytest_gpumem.cli.command import Answer, argument
from pytest_gpumem.cli.history import past_in_git, past_of
from pytest_gpumem.cli.history_figure import draw_history
from pytest_gpumem.echo import printable, quoted
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.trend import SMALL
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.values.measurement import Measurement

Measured = tuple["TestRecord", "Measurement"]
"""A test and its measurement."""

MOST_BARS = 30
"""Tests of one picture, those with the highest peaks."""

MOST_LETTERS = 60
"""The most characters of a test's name beside its bar."""

_PALETTE = "#5b9bd5 #e8833a #9b7fd1 #55b6b0 #e3b62f #c678a5 #8fbf5a #a7adb8".split()
COLOURS = dict(zip(CATEGORIES, _PALETTE, strict=True))
"""Colours of categories, as in the HTML report."""

HISTORY = "history"
"""The kind of picture that is not of one report."""

FORMATS = (".png", ".svg", ".pdf")


def draw(arguments: argparse.Namespace, suffix: str) -> Answer:
    """Draw the picture; raises ``ValueError`` for bad input."""
    reports: Sequence[Path] = arguments.reports
    kind, commits = arguments.kind, arguments.git
    output: Path | None = arguments.output
    if output is None:
        named = reports[-1] if reports else Path(HISTORY)
        output = named.with_name(f"{named.stem}{suffix}")
    elif output.suffix.lower() != suffix:
        raise ValueError(f"--output {output} does not end in {suffix}, as --to says")
    part: str = arguments.test
    wanted = f" whose id contains {quoted(part)}" if part else ""
    if kind == HISTORY:
        past = past_of(reports, commits, arguments.baselines, arguments.progress)
        trends = [trend for trend in past.trends(SMALL) if part in trend.nodeid]
        if not trends:
            raise ValueError(f"no report holds a measured test{wanted}")
        drawn_to(output, lambda figure: draw_history(figure, past, trends, SMALL))
        tests = [trend.nodeid for trend in trends]
    elif commits or len(reports) != 1:
        raise ValueError(
            f"--kind {kind} is of one report; several, and --git, are for --kind history"
        )
    else:
        found = [record for record in read_report(reports[0]) if part in record.nodeid]
        records = [(record, one) for record in found if (one := record.measurement) is not None]
        if not records:
            raise ValueError(f"{reports[0]} holds no measured test{wanted}")
        drawn_to(output, lambda figure: KINDS[kind](figure, records))
        tests = [record.nodeid for record, _ in records]
    shown = ", ".join(map(str, reports)) or commits
    return Answer(
        [f"{output}: {kind} of {shown}"],
        lambda: {"output": str(output), "kind": kind, "tests": tests},
    )


def drawn_to(output: Path, draw: Callable[[Figure], None]) -> None:
    """Write the figure that ``draw`` draws to ``output``.

    Raises ``ValueError`` where it cannot, or matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "pictures are drawn by matplotlib, which is not installed: "
            "pip install 'pytest-gpumem[plot]'"
        ) from error
    # Names of tests are not mathtext, even with dollars in them.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)


def _composition(figure: Figure, records: Sequence[Measured]) -> None:
    by_peak = sorted(records, key=lambda pair: pair[1].peak_allocated, reverse=True)
    shown = by_peak[:MOST_BARS][::-1]
    figure.set_figheight(1.5 + 0.28 * len(shown))
    rows = [(record.nodeid, one.composition, one.peak_allocated) for record, one in shown]
    _bars(figure.add_subplot(), rows)
    hidden = f", the highest {MOST_BARS} of {len(records)}" if len(records) > MOST_BARS else ""
    figure.suptitle(f"Peak by category{hidden}{_gpus(records)}")


def _phases(figure: Figure, records: Sequence[Measured]) -> None:
    name, measured = _only(records)
    phases = list(measured.phases.values())[::-1]
    rows = [(phase.name, phase.composition, phase.peak_allocated) for phase in phases]
    _bars(figure.add_subplot(), rows)
    figure.suptitle(f"{shorten(name, MOST_LETTERS)}: peak by phase{_gpus(records)}")


def _timeline(figure: Figure, records: Sequence[Measured]) -> None:
    axes = figure.add_subplot()
    nodeid, measured = _only(records)
    line = measured.timeline
    if line is None:
        raise ValueError(
            f"{printable(nodeid)} has no time line; run it with --gpumem-report html:PATH "
            "besides json:PATH, on a simulated device or with --gpumem-history"
        )
    names = [name for name in CATEGORIES if name in line["categories"]]
    positions = line["positions"]
    series = [line["categories"][name] for name in names]
    axes.stackplot(
        positions, series, labels=names, colors=[COLOURS[name] for name in names], step="post"
    )
    totals = [sum(at) for at in zip(*series, strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    axes.axvline(positions[peak], color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {format_size(totals[peak])}",
        (positions[peak], totals[peak]),
        xytext=(4, 4),
        textcoords="offset points",
    )
    for name, begin, end in line["phases"]:
        if name != "call":
            axes.axvspan(begin, end, ymin=0.97, alpha=0.35, color="gray", linewidth=0)
            axes.text(
                *(begin, 0.985, f" {printable(name)}"),
                va="center",
                fontsize=7,
                transform=axes.get_xaxis_transform(),
                clip_on=True,
            )
    axes.set_xlim(0, line["events"])
    axes.set_ylim(0, max(totals) * 1.2 or 1)
    axes.set_xlabel("events of the allocator")
    axes.set_ylabel("allocated")
    axes.spines[["top", "right"]].set_visible(False)
    _in_bytes(axes.yaxis, max(totals))
    figure.suptitle(f"{shorten(nodeid, MOST_LETTERS)}{_gpus(records)}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


KINDS = {"composition": _composition, "phases": _phases, "timeline": _timeline}


def _bars(axes: Axes, rows: Sequence[tuple[str, Mapping[str, int], int]]) -> None:
    """Draw a bar for each name, composition and peak (bytes); the rest of a peak is white."""
    labels = [shorten(name, MOST_LETTERS) for name, _, _ in rows]
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("peak allocated")
    axes.margins(y=0.01 if len(rows) > 1 else 0.5)
    places = range(len(rows))
    left = [0] * len(rows)
    for category in CATEGORIES:
        sizes = [composition.get(category, 0) for _, composition, _ in rows]
        if any(sizes):
            axes.barh(places, sizes, left=left, label=category, color=COLOURS[category])
            left = [done + size for done, size in zip(left, sizes, strict=True)]
    peaks = [peak for _, _, peak in rows]
    axes.barh(places, peaks, fill=False, edgecolor="gray", linewidth=0.6)
    for place, peak in zip(places, peaks, strict=True):
        axes.annotate(
            format_size(peak), (peak, place), xytext=(3, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(places, labels)
    axes.set_xlim(0, max(peaks) * 1.18 or 1)
    _in_bytes(axes.xaxis, max(peaks))
    if any(left):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _in_bytes(axis: Axis, highest: int) -> None:
    """Put the ticks of ``axis`` at round sizes: multiples of a power of two, about four."""
    step = 1 << max(highest // 5, 1).bit_length()
    axis.set_ticks(range(0, highest + step, step))
    axis.set_major_formatter(lambda size, _: format_size(round(size)))


def _only(records: Sequence[Measured]) -> tuple[str, Measurement]:
    record, measured = records[0]
    if len(records) > 1:
        raise ValueError(
            f"{len(records)} tests are meant, {printable(record.nodeid)} first, and this shows "
            "one; name it with --test"
        )
    return record.nodeid, measured


def _gpus(records: Sequence[Measured]) -> str:
    environments = (record.environment for record, _ in records)
    gpus = sorted({f"{'simulated ' * one.simulated}{one.gpu}" for one in environments})
    return f" [{', '.join(map(printable, gpus))}]"


ARGUMENTS = (
    argument(
        "--kind",
        group="png, svg, pdf",
        choices=[*KINDS, HISTORY],
        default="composition",
        help="what to draw; history takes several reports, the oldest first, or folders of them",
    ),
    argument(
        "--test",
        group="png, svg, pdf",
        metavar="TEXT",
        default="",
        help="of tests whose ids contain this (default: all)",
    ),
    *past_in_git("png, svg, pdf"),
)
