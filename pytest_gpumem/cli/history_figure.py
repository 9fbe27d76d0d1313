"""The picture of ``gpumem plot --kind history``: peaks over time, a panel for each test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.echo import printable
from pytest_gpumem.report.past import Past
from pytest_gpumem.report.trend import Step, Trend
from pytest_gpumem.sizes import Tolerance, format_apart, format_change, format_size
from pytest_gpumem.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 8
"""Tests of one picture, those whose peaks changed most."""
MOST_TICKS = 10
"""Commits or reports that are named below the last panel."""
MOST_LETTERS, MOST_LABEL = 58, 16
"""The most characters of a test's name, and of a commit's or report's."""

LINE, UP, DOWN, SMALL = "#5b9bd5", "#c8402f", "#3f8f4f", "#e3a02f"
WORDS = 0.26
"""Part of a panel's width that the words beside a step take."""
LINE_OF_WORDS = 0.3
"""Part of the range of its peaks that a line of words takes."""


def draw_history(figure: Figure, past: Past, trends: Sequence[Trend], small: Tolerance) -> None:
    """Draw ``trends``, at least one, over the moments of ``past``.

    A step, a change by more than ``small``, has a triangle, the largest also its size and its
    commit or report; growth within ``small`` has a dot.
    """
    shown = sorted(trends, key=_change, reverse=True)[:MOST_PANELS]
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
    _legend(figure, small)


def _change(trend: Trend) -> int:
    peaks = [point.peak for point in trend.points]
    return max(peaks) - min(peaks)


def _panel(axes: Axes, past: Past, trend: Trend, several: bool) -> None:
    key = (trend.environment, trend.nodeid)
    places = [at for at, (_, _, peaks) in enumerate(past.moments) if key in peaks]
    peaks = [point.peak for point in trend.points]
    axes.step(places, peaks, where="post", color=LINE, linewidth=1.6)
    at_end = [places[-1], max(len(past.moments) - 1, 1)]
    axes.plot(at_end, [peaks[-1]] * 2, color=LINE, linewidth=1.6, linestyle=":")
    where = dict(zip(map(id, trend.points), places, strict=True))
    grew = [(where[id(point)], point.peak) for point in trend.creeping]
    axes.plot([x for x, _ in grew], [y for _, y in grew], "o", color=SMALL, markersize=3.5)
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
    # The lowest and the highest peak, in digits that distinguish them.
    apart = ([low, high], format_apart(low, high)) if low < high else ([low], [format_size(low)])
    axes.set_yticks(*apart)
    axes.spines[["top", "right"]].set_visible(False)
    name = f"{trend.nodeid} [{trend.environment}]" if several else trend.nodeid
    axes.set_title(shorten(name, MOST_LETTERS), loc="left", fontsize=9)
    axes.set_title(_summary(trend), loc="right", fontsize=9)


def _annotated(
    steps: Sequence[Step], where: dict[int, int], last: int, span: int
) -> Iterator[tuple[Step, int]]:
    """Yield the largest steps whose words have room beside each other, and their places."""
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


def _summary(trend: Trend) -> str:
    change = trend.last - trend.first
    if not change:
        return f"{format_size(trend.last)}, as at first"
    percent = f" ({format_percent(change, trend.first)})" if trend.first > 0 else ""
    return f"{format_size(trend.last)}, {format_change(change)}{percent} since the first"


def _legend(figure: Figure, small: Tolerance) -> None:
    from matplotlib.lines import Line2D

    signs = (("^", UP, "step up"), ("v", DOWN, "step down"), ("o", SMALL, f"grew within {small}"))
    handles = [
        Line2D([], [], marker=marker, color=color, linestyle="none", label=label)
        for marker, color, label in signs
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=8)
