"""The assembly of the page: template, style, scripts and the run's data, in one text.

The page makes no network requests, and its content security policy forbids them: only the two
scripts whose hashes it names may run, so that a test's name never can.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pytest_gpumem.quoting import printable
from pytest_gpumem.report.html.view import detail_of, overview_of
from pytest_gpumem.report.record import TestRecord

if TYPE_CHECKING:
    from pytest_gpumem.report.past import Past

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
"""Tests whose details are packed, and unpacked, together."""

_UNUSUAL = re.compile(r'\\[^"]|\x7f')
"""Escapes in JSON for characters that may have to be shown as escapes: most reports have none."""


def render(
    records: Sequence[TestRecord], past: Past | None = None, usage: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page of ``records``, to be written as UTF-8; no name in them can break it.

    ``past`` has the peaks of earlier runs and at its end those of this one, ``usage`` is the use of
    shared devices, as in a JSON report.
    """
    ordered = sorted(records, key=lambda record: record.nodeid)
    overview = {**overview_of(ordered, TOGETHER, past), "usage": list(usage)}
    packed = []
    for begin in range(0, len(ordered), TOGETHER):
        text = compact(list(map(detail_of, ordered[begin : begin + TOGETHER])))
        packed.append(b64encode(zlib.compress(text.encode("ascii"))).decode("ascii"))
    return assembled("page.html", TESTS, overview, packed)


def assembled(template: str, scripts: Sequence[str], data: Any, packed: Iterable[str]) -> str:
    """Return the page with ``scripts`` and ``data``, and ``packed`` texts for later use."""
    libraries = "\n".join(_file(f"vendor/{name}") for name in LIBRARIES)
    script = "\n".join(["'use strict';", *map(_file, scripts)])
    digests = (sha256(one.encode()).digest() for one in (libraries, script))
    hashes = " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
    # Nothing in the JSON can end its script element.
    text = compact(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data:",
        "style": "\n".join(map(_file, STYLES)),
        "libraries": libraries,
        "script": script,
        "overview": text,
        "details": "\n".join(
            f'<script type="text/plain" class="details">{text}</script>' for text in packed
        ),
    }
    # The content of a part is never read as a placeholder.
    page = _file(template).split("@@")
    page[1::2] = [parts[name] for name in page[1::2]]
    return "".join(page)


def compact(data: Any) -> str:
    """Return ``data`` as JSON in ASCII with every text in it visible, as :func:`shown` makes it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if _UNUSUAL.search(text):
        text = json.dumps(shown(data), separators=(",", ":"), allow_nan=False)
    return text


def shown(data: Any) -> Any:
    """Return ``data`` with every text in it visible: control characters escaped, at any depth."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(str(key)): shown(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [shown(value) for value in data]
    return data


def _file(name: str) -> str:
    return files("pytest_gpumem.report.html").joinpath(name).read_text(encoding="utf-8")
