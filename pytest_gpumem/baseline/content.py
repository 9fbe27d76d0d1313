"""A baseline file: its JSON and its content."""

from __future__ import annotations

import json
import re
import stat
from collections import Counter, UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import compact
from pytest_gpumem.garbage import paused
from pytest_gpumem.jsonfile import DocumentError, NewerError, document, schema_problem
from pytest_gpumem.paths import from_here
from pytest_gpumem.quoting import printable, quoted_for_shell
from pytest_gpumem.simulated.common.compiled_notes import ran_eagerly
from pytest_gpumem.values.environment import KINDS, Environment
from pytest_gpumem.values.measurement import CALL, Measurement, PhaseRecord
from pytest_gpumem.values.serialization import OMITTED, Plain

_NUMBERS = ("peak_allocated", "peak_reserved", "allocated_after", "cublas_workspace")


@dataclass(frozen=True)
class StoredPeak(Plain):
    """The live blocks at a peak: bytes by category, and the largest sites."""

    composition: Mapping[str, int]
    sites: tuple[Site, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; unknown fields of a site are left out."""
        data = super().to_dict()
        for site in data["sites"]:
            for name in [name for name, value in site.items() if value is None]:
                del site[name]
        return data

    @classmethod
    def of(cls, measured: Measurement | PhaseRecord) -> StoredPeak | None:
        """Return the stored form of a peak, ``None`` where nothing was recorded."""
        sites = compact([Site.from_dict(site) for site in measured.sites])
        # The bytes of one block follow from its shape.
        compacted = tuple(replace(site, each=None) for site in sites)
        return cls(dict(measured.composition), compacted) if sites else None

    @property
    def without_lines(self) -> StoredPeak:
        """A copy without the source lines of its sites."""
        return replace(self, sites=tuple(replace(site, site=None) for site in self.sites))


@dataclass(frozen=True)
class BaselineEntry(Plain):
    """The stored numbers of one test; all in bytes, charged to the test."""

    peak_allocated: int
    peak_reserved: int
    allocated_after: int
    cublas_workspace: int
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak allocated by phase name."""
    peak: StoredPeak | None = None
    """The live blocks at the test's peak; ``None`` where not recorded."""
    phase_peaks: Mapping[str, StoredPeak] = field(default_factory=dict)
    """The live blocks by phase, where they differ from those of the whole test."""
    tolerance: str | None = field(default=None, metadata=OMITTED)
    """The test's own tolerance, in the marker's form; ``None`` for the default."""
    ran_eagerly: bool = field(default=False, metadata=OMITTED)
    """Whether code that was to be compiled ran eagerly on the simulated GPU."""
    facts: Mapping[str, Any] = field(default_factory=dict, metadata=OMITTED)
    """Facts of the test on which memory depends."""

    @classmethod
    def of(cls, measurement: Measurement, tolerance: str | None = None) -> BaselineEntry:
        """Return the entry of ``measurement``, of a test that may have its own ``tolerance``."""
        # CALL would repeat the whole test's numbers.
        phases = {name: p for name, p in measurement.phases.items() if name != CALL}
        peak = StoredPeak.of(measurement)
        peaks = {name: StoredPeak.of(phase) for name, phase in phases.items()}
        return cls(
            **{name: getattr(measurement, name) for name in _NUMBERS},
            phases={name: phase.peak_allocated for name, phase in phases.items()},
            peak=peak,
            phase_peaks={name: p for name, p in peaks.items() if p is not None and p != peak},
            tolerance=tolerance,
            ran_eagerly=any(map(ran_eagerly, measurement.notes)),
            facts=measurement.facts,
        )

    def peak_of(self, phase: str | None) -> StoredPeak | None:
        """Return the live blocks at the peak of ``phase``, or of the whole test for ``None``."""
        if phase is None or self.phases.get(phase) == self.peak_allocated:
            return self.peak if phase is None else self.phase_peaks.get(phase, self.peak)
        return self.phase_peaks.get(phase)

    @property
    def without_lines(self) -> BaselineEntry:
        """A copy without source lines, because moved code needs no new baseline."""
        if self.peak is None and not self.phase_peaks:
            return self
        return replace(
            self,
            peak=self.peak and self.peak.without_lines,
            phase_peaks={name: peak.without_lines for name, peak in self.phase_peaks.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the form of schema.json; composition and sites only where they were recorded."""
        data = super().to_dict()
        held, phases = data.pop("peak") or {}, data.pop("phase_peaks")
        data["phases"] = {
            name: {"peak_allocated": peak, **phases.get(name, {})}
            for name, peak in self.phases.items()
        }
        return data | held

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """Return the entry from :meth:`to_dict`'s form."""
        phases, own = data["phases"], {*data} - {"composition", "sites"}
        peaks = {name: held for name, phase in phases.items() if (held := _held(phase))}
        return super().from_dict(
            {name: data[name] for name in own}
            | {"phases": {name: phase["peak_allocated"] for name, phase in phases.items()}}
            | {"peak": _held(data), "phase_peaks": peaks}
        )


def _held(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON form of a stored peak, ``None`` where nothing was recorded."""
    known = {"composition": data.get("composition", {})}
    return {**known, "sites": data["sites"]} if "sites" in data else None


SCHEMA_VERSION = 1

_CONFLICT = re.compile(rb"^<{7}( |\r?$).*^={7}\r?$.*^>{7}( |\r?$)", re.MULTILINE | re.DOTALL)
"""Git's conflict markers."""


class BaselineError(ValueError):
    """A baseline that cannot be read or written; the message is one sentence for the user."""


@dataclass(frozen=True)
class BaselineFile:
    """The content of one file: its environment in full, and its tests by id."""

    environment: Environment
    tests: Entries


class Entries(UserDict[str, Any]):
    """The tests of a file by id; an entry is built only on access, as there may be thousands."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)
        """The JSON form of unchanged entries, as read."""

    def __getitem__(self, test_id: str) -> BaselineEntry:
        return BaselineEntry.from_dict(self.data[test_id])

    def __setitem__(self, test_id: str, entry: BaselineEntry) -> None:
        if self.get(test_id) != entry:  # an equal entry stays as it was read
            self.data[test_id] = entry.to_dict()


def read_file(path: Path, key: str) -> BaselineFile | None:
    """Return the content of the baseline file ``path`` of the environment ``key``.

    ``None`` where there is no such file. Raises :class:`BaselineError` where it cannot be read,
    does not follow the schema or states another environment.
    """
    content = file_bytes(path)
    return None if content is None else parse(path, content, key)


def read_folder(folder: Path) -> list[tuple[str, BaselineFile]]:
    """Return every module path and its file, sorted, of a baselines folder.

    ``folder`` contains a folder for each environment, or is one of these. Hidden folders beside
    those of environments are other programs'. Raises :class:`BaselineError` as :func:`read_file`
    does, and if it contains no baselines.
    """
    own = folder.resolve().name
    found = []
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        if parts[0].startswith(".") and own.partition("-")[0] not in KINDS:
            continue
        content = _parsed(path, file_bytes(path) or b"")
        key = content.environment.key
        if len(parts) > 1 and parts[0] == key:
            parts = parts[1:]
        elif own != key and key in parts:
            inner = folder.joinpath(*parts[: parts.index(key)])
            raise BaselineError(f"{folder} is not a baselines folder; give {inner}, which is one")
        elif own != key:
            raise _misplaced(path, content.environment, parts[0] if len(parts) > 1 else own)
        found.append((PurePosixPath(*parts).as_posix().removesuffix(".json"), content))
    if not found:
        raise BaselineError(
            f"{folder} holds no baselines; record some with pytest --gpumem-update-baselines"
        )
    return found


def file_bytes(path: Path) -> bytes | None:
    """Return the bytes of a baseline file, ``None`` where there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BaselineError(f"baseline {from_here(path)} is not a file; move it away")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable("read", path, error) from error


def parse(path: Path, content: bytes, key: str) -> BaselineFile:
    """Return the parsed ``content`` of the file ``path`` of the environment ``key``."""
    found = _parsed(path, content)
    if found.environment.key != key:
        raise _misplaced(path, found.environment, key)
    return found


def serialize(path: Path, environment: Environment, tests: Entries) -> bytes:
    """Return the new content of ``path``: sorted JSON with a line for each site."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.to_dict(),
        "tests": tests.data,
    }
    if problem := schema_problem(__package__, data):
        raise BaselineError(f"baseline {from_here(path)} was not written: {problem}")
    return f"{_layout(data, '')}\n".encode("ascii")


def unusable(verb: str, path: Path, error: OSError) -> BaselineError:
    """Return the error for a file that cannot be read or written."""
    reason = error.strerror or error
    file, folder = from_here(path), from_here(path.parent)
    return BaselineError(f"baseline {file} cannot be {verb}: {reason}; check {folder}")


def _parsed(path: Path, content: bytes) -> BaselineFile:
    try:
        with paused():
            data = document(
                content,
                __package__,
                SCHEMA_VERSION,
                object_pairs_hook=_unique,
                parse_float=_number,
                parse_constant=_not_a_number,
            )
    except NewerError as error:
        raise BaselineError(f"baseline {from_here(path)} {error}") from error
    except DocumentError as error:
        problem = (
            f"is damaged or not one of pytest-gpumem: {error}; restore it from version control or "
            "delete it"
        )
        if conflict := _CONFLICT.search(content):
            line = content.count(b"\n", 0, conflict.start()) + 1
            name = quoted_for_shell(path.name)
            problem = (
                f"has the conflict markers of a merge in line {line}; take one side, in its "
                f"folder, by git checkout --ours {name} or git checkout --theirs {name}, then "
                "record its tests again"
            )
        raise BaselineError(f"baseline {from_here(path)} {problem}") from error
    return BaselineFile(Environment.from_dict(data["environment"]), Entries(data["tests"]))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; reject a repeated key, which may come from a bad merge."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _number(text: str) -> float | int:
    """Read a number; 1.0 becomes an ``int``, as it is an integer for a JSON schema."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _layout(value: Any, margin: str) -> str:
    """Return indented, sorted JSON with one line for each object in an array.

    So each line of a diff is a number or a site.
    """
    if type(value) is int:
        return repr(value)
    inner = margin + "  "
    if isinstance(value, dict) and value:
        items = [f"{inner}{_text(name)}: {_layout(value[name], inner)}" for name in sorted(value)]
        return "{\n" + ",\n".join(items) + f"\n{margin}}}"
    if isinstance(value, list) and value:
        items = [inner + _line(item) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{margin}]"
    return _line(value)


_line = json.JSONEncoder(sort_keys=True).encode
_text = json.encoder.encode_basestring_ascii
"""An encoder of strings like json.dumps, called directly."""


def _misplaced(path: Path, environment: Environment, key: str) -> BaselineError:
    return BaselineError(
        f"baseline {from_here(path)} was recorded for {environment.key}, not for "
        f"{printable(key)}; move it to the folder of its environment"
    )
