"""Explain a test: run its body once more, recorded, where the run that counts was not.

The numbers of the earlier run count.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from pytest_gpumem.measurement.composition import explained_by
from pytest_gpumem.measurement.recorded import RecordedHistory, write_snapshot
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.session.run import EXPLAINED_BY, Run
from pytest_gpumem.sharing.refusal import sentence as sentence_of
from pytest_gpumem.sizes import format_size, in_words
from pytest_gpumem.values.measurement import Measurement

_OUTCOMES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of a second run that do not replace the first one's failure."""


def needs_second_run(run: Run) -> bool:
    """Return whether ``run`` has to be repeated before its memory can be explained."""
    return not run.is_recorded and run.settings.explain == "failed"


def explained_again(run: Run, record: TestRecord) -> tuple[tuple[Measurement, ...], list[str]]:
    """Return the measurements of ``record`` with sites, if a second run passes; and notes."""
    item = run.prepared.item
    recorder = RecordedHistory()
    try:
        with recorder.during(EXPLAINED_BY):
            run.record_again(recorder)
            with run.body():
                item.runtest()
            own, others = run.measured(passed=True)
            # Written here, because the recording is gone afterwards.
            notes = snapshot_of(run)
    except _OUTCOMES as error:
        why = (
            f"{item.nodeid}: nothing explains its memory, because the body does not run "
            f"twice: {type(error).__name__}: {error}"
        )
        return (), [*snapshot_of(run), why]
    again = {one.device: one for one in (own, *others)}
    pairs = [(first, again.get(first.device)) for first in record.measurements]
    return tuple(explained_by(one, two) if two else one for one, two in pairs), notes


def out_of_memory(
    run: Run, record: TestRecord | None, error: torch.OutOfMemoryError
) -> tuple[TestRecord | None, list[str]]:
    """Return ``record`` with why the body ran out of memory, and the lines on it.

    The body is run again for that if it was not recorded.
    """
    if not needs_second_run(run):
        return _post_mortem(run, record)
    # Else memory of the first run would be missing from the second one's. pytest
    # shows the traceback all the same, without the values of its variables.
    traceback.clear_frames(error.__traceback__)
    recorder = RecordedHistory()
    with recorder.during(EXPLAINED_BY), suppress(*_OUTCOMES):
        run.record_again(recorder)
        try:
            with run.body():
                run.prepared.item.runtest()
        except torch.OutOfMemoryError:
            explained = _post_mortem(run, record)
            if record is not None:
                snapshot_of(run)
            return explained
    return record, []


def snapshot_of(run: Run) -> list[str]:
    """Write the artifact if it is requested; return the sentence on it."""
    folder, nodeid = run.settings.artifacts, run.prepared.item.nodeid
    if folder is None:
        return []
    try:
        return [f"{nodeid}: its snapshot is {write_snapshot(folder, nodeid)}"]
    except OSError as error:
        return [
            f"{nodeid}: its snapshot cannot be written: {error.strerror or error}; "
            "give --gpumem-artifacts a folder that can be written"
        ]


def _post_mortem(run: Run, record: TestRecord | None) -> tuple[TestRecord | None, list[str]]:
    found, shortage = run.out_of_memory(), run.shortage
    lines = [] if shortage is None else [sentence_of(shortage, run.prepared.quota)]
    if found is None or record is None:
        return record, lines
    lines += found.lines()
    expectation = run.prepared.expectation
    limit = expectation.max if expectation else None
    if limit is not None and found.allocated > limit:
        written = in_words(limit) or format_size(limit)
        text = format_size(found.allocated)
        lines.append(f"  its limit max={written} was passed before: {text} were allocated")
    return replace(record, out_of_memory=found.to_dict()), ["\n".join(lines)]
