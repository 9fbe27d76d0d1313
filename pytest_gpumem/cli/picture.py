"""``gpumem report --to png``: a picture of a run's measurements, for a paper or a pull request."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.history import CATEGORIES
from pytest_gpumem.baseline.verdict import change_text
from pytest_gpumem.cli.command import Answer, Argument
from pytest_gpumem.cli.history import PAST_IN_GIT, past_of
from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.past import SMALL, Past, Step, Trend
from pytest_gpumem.sizes import format_apart, format_change, format_size
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
"""The most tests of one picture, those with the highest peaks."""

MOST_LETTERS = 60
"""The most characters of a test's name beside its bar."""

_PALETTE = "#5b9bd5 #e8833a #9b7fd1 #55b6b0 #e3b62f #c678a5 #8fbf5a #a7adb8".split()
COLOURS = dict(zip(CATEGORIES, _PALETTE, strict=True))
"""Colours of categories, as in the HTML report."""

HISTORY = "history"
"""The kind of picture that shows several reports."""

FORMATS = ("png", "svg", "pdf")


def draw(arguments: argparse.Namespace, form: str) -> Answer:
    """Draw the picture; raises ``ValueError`` for bad input."""
    reports: Sequence[Path] = arguments.reports
    kind, commits = arguments.kind, arguments.git
    output: Path | None = arguments.output
    if output is None:
        named = reports[-1] if reports else Path(HISTORY)
        output = named.with_name(f"{named.stem}.{form}")
    elif output.suffix.lower() != f".{form}":
        raise ValueError(f"--output {output} does not end in .{form}, as --to says")
    part: str = arguments.test
    wanted = f" whose id contains {quoted(part)}" if part else ""
    if kind == HISTORY:
        past = past_of(reports, commits, arguments.baselines, arguments.progress)
        trends = [trend for trend in past.trends(SMALL) if part in trend.nodeid]
        if not trends:
            raise ValueError(f"no report holds a measured test{wanted}")
        drawn_to(output, lambda figure: _history(figure, past, trends))
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

    Raises ``ValueError`` if it cannot be written, or matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "pictures are drawn by matplotlib, which is not installed: "
            "pip install 'pytest-gpumem[plot]'"
        ) from error
    # Dollar signs in names of tests must not start mathtext.
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
    """Put about four ticks on ``axis``, at multiples of a power of two."""
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


MOST_PANELS = 8
"""The most tests of one picture, those whose peaks changed most."""
MOST_TICKS = 10
"""The most commits or reports that are named below the last panel."""
MOST_TITLE, MOST_LABEL = 58, 16
"""The most characters of a panel's title, and of a commit's or report's name."""

LINE, UP, DOWN, DOT = "#5b9bd5", "#c8402f", "#3f8f4f", "#e3a02f"
WORDS = 0.26
"""The width of the text beside a step, as a part of the panel's width."""
LINE_OF_WORDS = 0.3
"""The height of a line of text, as a part of the range of peaks."""


def _history(figure: Figure, past: Past, trends: Sequence[Trend]) -> None:
    """Draw ``trends``, at least one, over the moments of ``past``.

    A triangle marks a step, a change by more than :data:`SMALL`; the largest steps also have their
    size and commit or report. A dot marks smaller growth.
    """
    from matplotlib.lines import Line2D

    shown = sorted(trends, key=lambda trend: trend.range, reverse=True)[:MOST_PANELS]
    figure.set_figheight(1.4 + 1.25 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    several = len({trend.environment for trend in trends}) > 1
    for axes, trend in zip(panels, shown, strict=True):
        _panel(axes, past, trend, several)
    every = -(-len(past.moments) // MOST_TICKS)
    places = range(0, len(past.moments), every)
    names = [shorten(printable(past.moments[at][0]), MOST_LABEL) for at in places]
    panels[-1].set_xticks(places, names, rotation=30, ha="right", fontsize=8)
    hidden = f", the {MOST_PANELS} of {len(trends)} tests that changed most"
    where = "" if several else f" [{printable(shown[0].environment)}]"
    figure.suptitle(f"Peak over time{hidden if len(trends) > MOST_PANELS else ''}{where}")
    signs = (("^", UP, "step up"), ("v", DOWN, "step down"), ("o", DOT, f"grew within {SMALL}"))
    handles = [
        Line2D([], [], marker=marker, color=color, linestyle="none", label=label)
        for marker, color, label in signs
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=8)


def _panel(axes: Axes, past: Past, trend: Trend, several: bool) -> None:
    key = (trend.environment, trend.nodeid)
    places = [at for at, (_, _, peaks) in enumerate(past.moments) if key in peaks]
    peaks = [point.peak for point in trend.points]
    axes.step(places, peaks, where="post", color=LINE, linewidth=1.6)
    at_end = [places[-1], max(len(past.moments) - 1, 1)]
    axes.plot(at_end, [peaks[-1]] * 2, color=LINE, linewidth=1.6, linestyle=":")
    where = dict(zip(map(id, trend.points), places, strict=True))
    grew = [(where[id(point)], point.peak) for point in trend.creeping]
    axes.plot([x for x, _ in grew], [y for _, y in grew], "o", color=DOT, markersize=3.5)
    for step in trend.steps:
        up = step.bytes > 0
        axes.plot(
            where[id(step.point)],
            step.point.peak,
            marker="^" if up else "v",
            color=UP if up else DOWN,
            markersize=6,
        )
    low, high = min(peaks), max(peaks)
    span = (high - low) or max(high, 1)
    axes.set_ylim(low - 0.2 * span, high + 0.55 * span)
    last = max(len(past.moments) - 1, 1)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    for step, at in _annotated(trend.steps, where, last, span):
        left = at > last / 2
        axes.annotate(
            f"{format_change(step.bytes)} {shorten(printable(step.point.label), MOST_LABEL)}",
            (at, step.point.peak),
            xytext=(-6 if left else 6, 6),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
            color=UP if step.bytes > 0 else DOWN,
        )
    # The lowest and the highest peak, with enough digits to distinguish them.
    apart = ([low, high], format_apart(low, high)) if low < high else ([low], [format_size(low)])
    axes.set_yticks(*apart)
    axes.spines[["top", "right"]].set_visible(False)
    name = f"{trend.nodeid} [{trend.environment}]" if several else trend.nodeid
    axes.set_title(shorten(name, MOST_TITLE), loc="left", fontsize=9)
    now = format_size(trend.last)
    since = f"{change_text(trend.first, trend.last)} since the first"
    since = since if trend.last != trend.first else "as at first"
    axes.set_title(f"{now}, {since}", loc="right", fontsize=9)


def _annotated(
    steps: Sequence[Step], where: dict[int, int], last: int, span: int
) -> Iterator[tuple[Step, int]]:
    """Yield the largest steps whose texts do not overlap, and the positions of the texts."""
    taken: list[tuple[float, float, int]] = []
    for step in sorted(steps, key=lambda step: -abs(step.bytes)):
        at, peak = where[id(step.point)], step.point.peak
        begin, end = (at - WORDS * last, at) if at > last / 2 else (at, at + WORDS * last)
        if all(
            end < other_begin or begin > other_end or abs(peak - other) > LINE_OF_WORDS * span
            for other_begin, other_end, other in taken
        ):
            taken.append((begin, end, peak))
            yield step, at


ARGUMENTS = (
    Argument(
        "--kind",
        "what to draw; history takes several reports, the oldest first, or folders of them",
        choices=[*KINDS, HISTORY],
        default="composition",
    ),
    Argument("--test TEXT", "of tests whose ids contain this (default: all)", default=""),
    *PAST_IN_GIT,
)
