"""The JSON report, ``--gpumem-report json:PATH``: every number of a run, by schema.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from errno import EISDIR
from pathlib import Path
from typing import Any

from pytest_gpumem.garbage import paused
from pytest_gpumem.jsonfile import NewerError, document, replace_file, schema_problem
from pytest_gpumem.paths import from_here
from pytest_gpumem.quoting import MOST, printable
from pytest_gpumem.report.record import TestRecord

SCHEMA_VERSION = 1


def report_of(
    records: Iterable[TestRecord], usage: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the report of a run as builtin types, the tests sorted by node id.

    The report's environment is that of most tests; tests with another one contain it. ``usage`` is
    the use of shared devices.
    """
    ordered = sorted(records, key=lambda record: record.nodeid)
    counts = Counter(record.environment for record in ordered)
    common = counts.most_common(1)[0][0] if counts else None
    tests = [record.to_dict() for record in ordered]
    for record, data in zip(ordered, tests, strict=True):
        if record.environment == common:
            del data["environment"]
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": common and common.to_dict(),
        "tests": tests,
        **({"usage": list(usage)} if usage else {}),
    }


def write_report(
    path: Path, records: Sequence[TestRecord], usage: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write the report of ``records`` to ``path``, as :func:`write_file` writes its content."""
    with paused():
        report = report_of(records, usage)
        if problem := schema_problem(__package__, report):
            raise ValueError(f"report {path} was not written: {problem}")
        content = _text(report).encode("ascii")
    return write_file(path, content, "--gpumem-report json:PATH")


def _text(report: Mapping[str, Any]) -> str:
    """Return ``report`` as JSON with a line for each test: fast to write, and easy to search."""
    parts = []
    for name, value in report.items():
        if name == "tests":
            lines = ",\n".join(json.dumps(test, allow_nan=False) for test in value)
            text = f"[\n{lines}\n]" if value else "[]"
        else:
            text = json.dumps(value, allow_nan=False)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_file(path: Path, content: bytes, asked_by: str) -> Path:
    """Write a report's ``content`` to ``path`` atomically; return the file written.

    Missing folders are created, symbolic links followed. Raises ``ValueError``, which tells
    the user to change the option ``asked_by``, if the file cannot be written.
    """
    try:
        target = path.resolve()
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "Is a directory")
        if target.exists() and not target.is_file():
            # A pipe or a device such as /dev/stdout must not be replaced by a file.
            target.write_bytes(content)
        else:
            replace_file(target, content)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"report {printable(str(from_here(path)), MOST)} cannot be written: {reason}; "
            f"give {asked_by} a file that can be written"
        ) from error
    return target


def read_report(path: Path) -> list[TestRecord]:
    """Return the tests of the report ``path``; raises ``ValueError`` where it is none."""
    with paused():
        data = _read(path)
        common = {"environment": data["environment"]}
        return [TestRecord.from_dict({**common, **test}) for test in data["tests"]]


def read_usage(path: Path) -> list[dict[str, Any]]:
    """Return the use of shared devices in the report ``path``; raises as :func:`read_report`."""
    usage: list[dict[str, Any]] = _read(path).get("usage", [])
    return usage


def _read(path: Path) -> dict[str, Any]:
    try:
        return document(path.read_bytes(), __package__, SCHEMA_VERSION)
    except OSError as error:
        raise ValueError(
            f"report {path} cannot be read: {error.strerror or error}; check the path"
        ) from error
    except NewerError as error:
        raise ValueError(f"report {path} {error}") from error
    except ValueError as error:  # a path with a NUL is one, too
        raise ValueError(
            f"report {path} is not one of pytest-gpumem: {error}; write it with "
            "--gpumem-report json:PATH"
        ) from error
