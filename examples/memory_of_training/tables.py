"""The data of the charts: measurements and their predictions."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.memory_of_training import closed_form
from examples.memory_of_training.experiments import bytes_per_element, staircase
from examples.memory_of_training.timelines import (
    SEGMENTS,
    MakeOptimizer,
    optimizer_timeline,
    step_timeline,
)


@dataclass(frozen=True)
class Table:
    """Named columns; all sizes in bytes."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | float, ...]]

    def write(self, folder: Path) -> Path:
        """Write ``NAME.csv`` and return its path."""
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)
        return path


def elements_table() -> Table:
    """Bytes per element of each dtype."""
    return Table("bytes_per_element", ("dtype", "bytes"), list(bytes_per_element().items()))


def blocks_table() -> Table:
    """Return the bytes that float32 tensors take."""
    rows = [(elements, 4 * elements, taken) for elements, taken in enumerate(staircase())]
    return Table("blocks_of_512_bytes", ("elements", "requested", "allocated"), rows)


def optimizer_table(name: str, make_optimizer: MakeOptimizer, state_copies: int) -> Table:
    """Four steps of training, predicted by category, and measured."""
    predicted = closed_form.optimizer_timeline(state_copies)
    measured = optimizer_timeline(make_optimizer)
    rows: list[tuple[str | float, ...]] = [
        (event, *held.values(), sum(held.values()), measured[event])
        for event, held in predicted.items()
    ]
    columns = ("event", *closed_form.CATEGORIES, "predicted", "measured")
    return Table(f"training_with_{name}", columns, rows)


def step_table() -> Table:
    """Every allocation and free of one step with Adam."""
    moments = step_timeline(torch.optim.Adam)
    rows: list[tuple[str | float, ...]] = [
        (moment.milliseconds, moment.phase, *moment.segments.values(), moment.allocated)
        for moment in moments
    ]
    columns = ("milliseconds", "phase", *SEGMENTS, "allocated")
    return Table("one_step_with_adam", columns, rows)


def all_tables() -> list[Table]:
    """Return all tables that are drawn, measured on the present CUDA device."""
    return [
        elements_table(),
        blocks_table(),
        optimizer_table("sgd", torch.optim.SGD, state_copies=0),
        optimizer_table("adam", torch.optim.Adam, state_copies=2),
        step_table(),
    ]
