"""The page: template, style, scripts and the run's data, in one text.

The data are a row for each test in the first view, and its details, which a click opens.

The page makes no network requests, and its content security policy forbids them. Only the two
scripts whose hashes are in the policy may run, so that text from tests cannot.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any

from pytest_gpumem.attribution.history import CATEGORIES
from pytest_gpumem.baseline.verdict import Verdict, failure_statements, main_verdict, update_command
from pytest_gpumem.quoting import printable
from pytest_gpumem.report.causes import causes_of
from pytest_gpumem.report.past import SMALL, Past
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.rows import test_status
from pytest_gpumem.sizes import format_size

LIBRARIES = ("uPlot.iife.min.js", "d3-hierarchy.min.js")
DRAWING = (
    *("format.js", "bars.js", "grids.js", "treemap.js"),
    *("sampling.js", "chart.js", "segments.js"),
)
"""Scripts that all pages use for drawing."""
TESTS = (*DRAWING, "timeline.js", "trend.js", "usage.js", "detail.js", "table.js")
RECORDING = (*DRAWING, "tape.js", "recording.js")
STYLES = ("vendor/uPlot.min.css", "page.css")
TOGETHER = 20
"""The number of tests whose details are packed together."""

_UNUSUAL = re.compile(r'\\[^"]|\x7f')
"""JSON escapes of characters that may have to be shown as escapes; most reports have none."""


def render(
    records: Sequence[TestRecord], past: Past | None = None, usage: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page of ``records``, to be written as UTF-8; names in them are escaped.

    ``past`` has the peaks of earlier runs and, last, of this one; ``usage`` is the use of shared
    devices, as in a JSON report.
    """
    ordered = sorted(records, key=lambda record: record.nodeid)
    overview = {**overview_of(ordered, past), "usage": list(usage)}
    groups = (ordered[begin : begin + TOGETHER] for begin in range(0, len(ordered), TOGETHER))
    details = [packed(list(map(detail_of, group))) for group in groups]
    return assembled("page.html", TESTS, overview, details)


def assembled(template: str, scripts: Sequence[str], data: Any, details: Iterable[str]) -> str:
    """Return the page with ``scripts`` and ``data``, and packed ``details`` for later use."""
    libraries = "\n".join(_file(f"vendor/{name}") for name in LIBRARIES)
    script = "\n".join(["'use strict';", *map(_file, scripts)])
    digests = (sha256(one.encode()).digest() for one in (libraries, script))
    hashes = " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
    # In this form the JSON cannot end its script element.
    text = compact(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data:",
        "style": "\n".join(map(_file, STYLES)),
        "libraries": libraries,
        "script": script,
        "overview": text,
        "details": "\n".join(
            f'<script type="text/plain" class="details">{text}</script>' for text in details
        ),
    }
    # A single substitution, so that placeholders in the parts are not replaced.
    page = _file(template).split("@@")
    page[1::2] = [parts[name] for name in page[1::2]]
    return "".join(page)


def packed(data: Any) -> str:
    """Return ``data`` as JSON, deflated, as text for a page."""
    return b64encode(zlib.compress(compact(data).encode("ascii"))).decode("ascii")


def compact(data: Any) -> str:
    """Return ``data`` as ASCII JSON with the control characters escaped as in :func:`shown`."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if _UNUSUAL.search(text):
        text = json.dumps(shown(data), separators=(",", ":"), allow_nan=False)
    return text


def shown(data: Any) -> Any:
    """Return ``data`` with the control characters of all its texts, at any depth, escaped."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(str(key)): shown(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [shown(value) for value in data]
    return data


def _file(name: str) -> str:
    return files("pytest_gpumem.report.html").joinpath(name).read_text(encoding="utf-8")


STATUSES = {
    "failed": "failed by its memory",
    "error": "failed for another reason",
    "xfail": "failed by its memory, as expected",
    "improved": "fell below its baseline",
    "new": "has no baseline yet",
    "measured": "measured and not judged",
    "skipped": "skipped",
    "ok": "within what it may use",
}
"""Outcomes of a test and their meaning, in the order of the first view."""

_STATUS_OF = {"FAIL": "failed", "xfail": "xfail", "better": "improved", "new": "new", "ok": "ok"}


def overview_of(records: Sequence[TestRecord], past: Past | None) -> dict[str, Any]:
    """Return the data of the first view on all tests; sizes in bytes, times in seconds."""
    trends = _trends(past)
    places = {id(record): position for position, record in enumerate(records)}
    environments = list(dict.fromkeys(record.environment for record in records))
    return {
        "statuses": STATUSES,
        "categories": CATEGORIES,
        "together": TOGETHER,
        "environments": [environment.to_dict() for environment in environments],
        "moments": [label for label, *_ in past.moments] if past else [],
        "tests": [
            _row(record, environments.index(record.environment)) | trends.get(record.key, {})
            for record in records
        ],
        "causes": [
            {
                "words": list(cause.words),
                "tests": [places[id(record)] for record in cause.records],
                "size": cause.size,
            }
            for cause in causes_of(records)
        ],
    }


def detail_of(record: TestRecord) -> dict[str, Any]:
    """Return all data of one test, with the sentences of its verdicts."""
    data = record.to_dict()
    for measured in (data["measurement"], *data["other_devices"]):
        if measured is not None and "call" in measured["phases"]:
            measured["phases"]["call"]["sites"] = []  # equal to those of the whole test
    if data["baseline"] is not None:  # only its numbers are shown
        data["baseline"] = {k: data["baseline"].get(k) for k in ("peak_allocated", "composition")}
    # The failed verdicts first, in the order of every report.
    statements = failure_statements(record.broken)
    broken = [verdict for one in statements for verdict in (one.verdict, *one.others)]
    data["verdicts"] = [
        verdict.to_dict()
        | {"text": verdict.short, "remedy": verdict.remedy(update_command(record.nodeid))}
        for verdict in (*broken, *(verdict for verdict in record.verdicts if verdict.passed))
    ]
    for shown, better in zip(data["improvements"], record.improvements, strict=True):
        shown["text"] = better.short
    return data


def status_of(record: TestRecord) -> str:
    """Return the test's key in :data:`STATUSES`."""
    other = {"skipped": "skipped", "failed": "error", "error": "error"}
    return _STATUS_OF.get(test_status(record)) or other.get(record.outcome, "measured")


def _trends(past: Past | None) -> Mapping[tuple[str, str], dict[str, Any]]:
    """Return the history for each test's row: index and peak of each point, and the steps."""
    if past is None:
        return {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number, (_, _, peaks) in enumerate(past.moments):
        for key, peak in peaks.items():
            found.setdefault(key, {"trend": []})["trend"].append([number, peak])
    for trend in past.trends(SMALL):
        steps = [[step.point.label, step.before, step.point.peak] for step in trend.steps]
        found[trend.environment, trend.nodeid] |= {"steps": steps, "crept": trend.crept}
    return found


def _row(record: TestRecord, environment: int) -> dict[str, Any]:
    measured = record.measurement
    row: dict[str, Any] = {
        "id": record.nodeid,
        "status": status_of(record),
        "environment": environment,
    }
    if measured is not None:
        row |= {
            "peak": measured.peak_allocated,
            "reserved": measured.peak_reserved,
            "composition": [measured.composition.get(name, 0) for name in CATEGORIES],
            "device": measured.device,
        }
    stored = (record.baseline or {}).get("peak_allocated")
    compared = (verdict.reference for verdict in _whole(record, "baseline") if verdict.reference)
    known = {
        "limit": next((verdict.limit for verdict in _whole(record, "limit")), None),
        "baseline": next(compared, stored),
        "duration": record.duration,
        "waited": (record.sharing or {}).get("waited"),
        **_failure(record),
    }
    return row | {key: value for key, value in known.items() if value is not None}


def _failure(record: TestRecord) -> dict[str, Any]:
    """Return a few words on why a test failed, and by how many bytes if a number is the reason.

    The cards above the table show the cause.
    """
    if record.broken:
        first = main_verdict(record.broken)
        compared = first.limit is not None or first.reference is not None
        return {"why": first.brief, "over": abs(first.excess) if compared else None}
    if record.out_of_memory is None:
        return {}
    lacked = f", {format_size(record.missing)} too much" if record.missing else ""
    return {"why": f"out of memory{lacked}", "over": record.missing}


def _whole(record: TestRecord, kind: str) -> list[Verdict]:
    """Return the verdicts on the peak of the whole test on its judged device."""
    device = record.measurement.device if record.measurement else None
    return [
        verdict
        for verdict in record.verdicts
        if (verdict.kind, verdict.metric, verdict.phase) == (kind, "peak_allocated", None)
        and verdict.device == device
    ]
