"""Notes for readers of the numbers, and counts of reads of values that were not computed."""

from __future__ import annotations

from collections import Counter

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.values.errors import UnknownValueError

MOST_NOTES = 20
MOST_READS = 10_000
"""Placeholders that one line may read."""


class Notes:
    """Sentences about a simulation, and its reads of unknown values."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.placeholder_reads: Counter[str] = Counter()
        """By line: how often a placeholder was read there."""
        self.assumed = False
        """Whether a condition on unknown values was answered by an assumption."""

    def note(self, sentence: str, *, always: bool = False) -> None:
        """Keep a sentence for readers of the numbers, if it is among the first or ``always``."""
        if always or len(self.notes) < MOST_NOTES:
            self.notes[sentence] = None

    def assume(self, sentence: str) -> None:
        """Note that the answer to a question about unknown values is assumed."""
        self.assumed = True
        self.note(sentence)

    def count_read(self, name: str) -> str:
        """Count a read of a value that a simulated GPU does not have; return its line.

        Raises :class:`UnknownValueError` where one line reads without end.
        """
        line = user_line()
        self.placeholder_reads[line] += 1
        if self.placeholder_reads[line] > MOST_READS:
            raise UnknownValueError(
                f"{name} at {line} read values that a simulated GPU does not have {MOST_READS:,} "
                f"times: this looks like a loop that waits for a value, which a simulated GPU "
                f"never computes"
            )
        return line

    def note_finite(self) -> None:
        """Note that a line checks whether unknown numbers are finite, and that this is assumed.

        Raises :class:`UnknownValueError` where one line does so without end.
        """
        line = self.count_read("a search for infinities and NaN")
        self.assume(
            f"{line} looks for infinities or NaN in numbers that are not computed: they were "
            f"taken for finite"
        )
