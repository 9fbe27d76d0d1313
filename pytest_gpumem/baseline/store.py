"""Baselines on disk: one JSON file per environment and test module.

``<root>/<environment.key>/<test module path>.json``, so the tests of ``tests/test_model.py`` stand
in ``baselines/sim-T4-torch2.13/tests/test_model.py.json``.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import compact
from pytest_gpumem.device.environment import Environment
from pytest_gpumem.jsonfile import replace_file, schema_problem
from pytest_gpumem.measurement.record import CALL

if TYPE_CHECKING:
    from pytest_gpumem.measurement.record import Measurement, PhaseRecord

SCHEMA_VERSION = 1


class BaselineError(ValueError):
    """A baseline that cannot be read or written; the message is one sentence for the user."""


@dataclass(frozen=True)
class StoredPeak:
    """What was live at a peak: bytes by category, and the largest sites."""

    composition: Mapping[str, int]
    sites: tuple[Site, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; what is unknown of a site is left out."""
        return {
            "composition": dict(self.composition),
            "sites": [
                {key: value for key, value in site.to_dict().items() if value is not None}
                for site in self.sites
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredPeak | None:
        """Rebuild what :meth:`to_dict` wrote, ``None`` where nothing was recorded."""
        if "sites" not in data:
            return None
        sites = tuple(Site.from_dict(site) for site in data["sites"])
        return cls(data.get("composition", {}), sites)

    @classmethod
    def of(cls, measured: Measurement | PhaseRecord) -> StoredPeak | None:
        """Return what is to be stored of a peak, ``None`` where nothing was recorded."""
        if not measured.sites:
            return None
        sites = [Site.from_dict(site) for site in measured.sites]
        return cls(dict(measured.composition), compact(sites))

    @property
    def without_lines(self) -> StoredPeak:
        """The same, whatever lines the sites stand in."""
        return replace(self, sites=tuple(replace(site, site=None) for site in self.sites))


@dataclass(frozen=True)
class BaselineEntry:
    """What is stored of one test; all numbers in bytes, charged to the test."""

    peak_allocated: int
    peak_reserved: int
    allocated_after: int
    cublas_workspace: int
    phases: Mapping[str, int] = field(default_factory=dict)
    """Peak allocated by phase name."""
    peak: StoredPeak | None = None
    """What was live at the test's peak; ``None`` where not recorded."""
    phase_peaks: Mapping[str, StoredPeak] = field(default_factory=dict)
    """The same by phase, where it is not that of the whole test."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))
        object.__setattr__(self, "phase_peaks", MappingProxyType(dict(self.phase_peaks)))

    @classmethod
    def of(cls, measurement: Measurement) -> BaselineEntry:
        """Return the entry that records ``measurement``."""
        # CALL would be the whole test's numbers once more.
        phases = {name: p for name, p in measurement.phases.items() if name != CALL}
        peak = StoredPeak.of(measurement)
        peaks = {name: StoredPeak.of(phase) for name, phase in phases.items()}
        return cls(
            peak_allocated=measurement.peak_allocated,
            peak_reserved=measurement.peak_reserved,
            allocated_after=measurement.allocated_after,
            cublas_workspace=measurement.cublas_workspace,
            phases={name: phase.peak_allocated for name, phase in phases.items()},
            peak=peak,
            phase_peaks={name: p for name, p in peaks.items() if p is not None and p != peak},
        )

    def peak_of(self, phase: str | None) -> StoredPeak | None:
        """Return what was live at the peak of ``phase``, or of the whole test for ``None``."""
        if phase is None or phase in self.phase_peaks:
            return self.peak if phase is None else self.phase_peaks[phase]
        same = self.peak is not None and self.phases.get(phase) == self.peak_allocated
        return self.peak if same else None

    @property
    def without_lines(self) -> BaselineEntry:
        """The same, whatever lines the code stands in: moved code needs no new baseline."""
        return replace(
            self,
            peak=self.peak and self.peak.without_lines,
            phase_peaks={name: peak.without_lines for name, peak in self.phase_peaks.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of schema.json; composition and sites only where they were recorded."""
        return {
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "allocated_after": self.allocated_after,
            "cublas_workspace": self.cublas_workspace,
            "phases": {
                name: {"peak_allocated": peak, **_peak_dict(self.phase_peaks.get(name))}
                for name, peak in self.phases.items()
            },
            **_peak_dict(self.peak),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """Rebuild what :meth:`to_dict` wrote."""
        numbers = ("peak_allocated", "peak_reserved", "allocated_after", "cublas_workspace")
        peaks = {name: StoredPeak.from_dict(phase) for name, phase in data["phases"].items()}
        return cls(
            **{name: data[name] for name in numbers},
            phases={name: phase["peak_allocated"] for name, phase in data["phases"].items()},
            peak=StoredPeak.from_dict(data),
            phase_peaks={name: peak for name, peak in peaks.items() if peak is not None},
        )


def _peak_dict(peak: StoredPeak | None) -> dict[str, Any]:
    return {} if peak is None else peak.to_dict()


@dataclass(frozen=True)
class BaselineFile:
    """The content of one file: its environment in full, and its tests by id."""

    environment: Environment
    tests: Mapping[str, BaselineEntry]


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """Return the module's path and the test's id of a node id.

    The ``@group`` that pytest-xdist's ``--dist loadgroup`` appends is left out, as it finds it
    itself: behind the last bracket.
    """
    module, _, test_id = nodeid.partition("::")
    if test_id.rfind("@") > test_id.rfind("]"):
        test_id = test_id[: test_id.rfind("@")]
    return module, test_id


class BaselineStore:
    """The baselines under one folder.

    Reading keeps what it read; every method that writes reads the file again first. A file that is
    damaged, of another kind or of another environment raises :class:`BaselineError` and is never
    overwritten.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._loaded: dict[Path, BaselineFile | None] = {}

    def path(self, environment: Environment, module: str) -> Path:
        """Return the file of the test module ``module``, a path relative to pytest's rootdir.

        Raises :class:`BaselineError` where the module lies outside the rootdir.
        """
        return self._path(environment.key, module)

    def load(self, environment: Environment, module: str) -> Mapping[str, BaselineEntry]:
        """Return the entries of a module by test id, empty where there is no file."""
        content = self._content(environment.key, module)
        return content.tests if content else {}

    def read(self, environment: Environment, module: str) -> Mapping[str, BaselineEntry]:
        """As :meth:`load`, from the file as it is now."""
        self._loaded.pop(self.path(environment, module), None)
        return self.load(environment, module)

    def entry(self, environment: Environment, module: str, test_id: str) -> BaselineEntry | None:
        """Return the entry of one test, ``None`` where it has none in this environment."""
        return self.load(environment, module).get(test_id)

    def elsewhere(
        self, module: str, test_id: str, environment: Environment
    ) -> list[tuple[Environment, BaselineEntry]]:
        """Return what other environments know of a test, by key: for display only.

        Their unreadable files are passed over: they are of no concern to this environment.
        """
        known = []
        for folder in sorted(self._folders()):
            if folder.name == environment.key:
                continue
            try:
                content = self._content(folder.name, module)
            except BaselineError:
                continue
            if content and test_id in content.tests:
                known.append((content.environment, content.tests[test_id]))
        return known

    def modules(self, environment: Environment) -> list[str]:
        """Return the module paths that have a file in this environment, sorted."""
        folder = self.root / environment.key
        return sorted(
            path.relative_to(folder).as_posix().removesuffix(".json")
            for path in folder.rglob("*.json")
        )

    def write(
        self, environment: Environment, module: str, tests: Mapping[str, BaselineEntry]
    ) -> Path | None:
        """Make ``tests`` the entries of a module; return the file, ``None`` where nothing changed.

        Atomic: a reader sees the old file or the new one, also while another process writes. With
        no tests left the file goes, and the folders that this leaves empty.
        """
        path = self.path(environment, module)
        self._loaded.pop(path, None)
        content = read_file(path, environment.key)
        if dict(content.tests if content else {}) == dict(tests):
            return None
        if path.is_symlink():
            raise BaselineError(
                f"baseline {path} is a symbolic link and is not written through; put the file "
                "itself in its place"
            )
        try:
            if tests:
                replace_file(path, _serialize(path, environment, tests))
            else:
                self._remove(path)
        except OSError as error:
            raise _unusable("written", path, error) from error
        return path

    def _path(self, key: str, module: str) -> Path:
        parts = PurePosixPath(module).parts
        if not parts or ".." in parts or Path(module).is_absolute():
            raise BaselineError(
                f"{module!r} lies outside pytest's rootdir, so its baselines have no place under "
                f"{self.root}; set --rootdir to a folder that holds it"
            )
        return self.root.joinpath(key, *parts[:-1], f"{parts[-1]}.json")

    def _content(self, key: str, module: str) -> BaselineFile | None:
        path = self._path(key, module)
        if path not in self._loaded:
            self._loaded[path] = read_file(path, key)
        return self._loaded[path]

    def _folders(self) -> Iterator[Path]:
        try:
            yield from (path for path in self.root.iterdir() if path.is_dir())
        except OSError:
            return

    def _remove(self, path: Path) -> None:
        path.unlink()
        for folder in path.parents:
            if folder == self.root or any(folder.iterdir()):
                return
            folder.rmdir()


def read_file(path: Path, key: str) -> BaselineFile | None:
    """Return what the baseline file ``path`` of the environment ``key`` holds.

    ``None`` where there is no such file. Raises :class:`BaselineError` where it cannot be read,
    does not follow the schema or states another environment.
    """
    try:
        content = _parsed(path)
    except FileNotFoundError:
        return None
    if content.environment.key != key:
        raise _misplaced(path, content.environment, key)
    return content


def read_folder(folder: Path) -> list[tuple[str, BaselineFile]]:
    """Return every module path and its file, sorted, of a baselines folder.

    ``folder`` is the one with an environment's folder for each, or one of these. Raises
    :class:`BaselineError` as :func:`read_file` does, and where nothing is in it.
    """
    own = folder.resolve().name
    found = []
    for path in sorted(folder.rglob("*.json")):
        content = _parsed(path)
        key, parts = content.environment.key, path.relative_to(folder).parts
        if len(parts) > 1 and parts[0] == key:
            parts = parts[1:]
        elif own != key:
            raise _misplaced(path, content.environment, parts[0] if len(parts) > 1 else own)
        found.append((PurePosixPath(*parts).as_posix().removesuffix(".json"), content))
    if not found:
        raise BaselineError(
            f"{folder} holds no baselines; record some with pytest --gpumem-update-baselines"
        )
    return found


def _parsed(path: Path) -> BaselineFile:
    data = _json(path)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BaselineError(
            f"baseline {path} has schema_version {version} and this pytest-gpumem reads "
            f"{SCHEMA_VERSION}; install a newer one"
        )
    if problem := schema_problem(__package__, data):
        raise _damaged(path, problem)
    tests = {test_id: BaselineEntry.from_dict(test) for test_id, test in data["tests"].items()}
    return BaselineFile(Environment.from_dict(data["environment"]), MappingProxyType(tests))


def _json(path: Path) -> Any:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BaselineError(f"baseline {path} is not a file; move it away")
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable("read", path, error) from error
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON; a key that stands twice is what a bad merge leaves behind."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _serialize(path: Path, environment: Environment, tests: Mapping[str, BaselineEntry]) -> bytes:
    data = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.to_dict(),
        "tests": {test_id: entry.to_dict() for test_id, entry in tests.items()},
    }
    if problem := schema_problem(__package__, data):
        raise BaselineError(f"baseline {path} was not written: {problem}")
    return f"{_compact_sites(json.dumps(data, indent=2, sort_keys=True))}\n".encode("ascii")


def _compact_sites(text: str) -> str:
    """Return JSON with each site on a line of its own, as a diff of two versions is read."""
    lines: list[str] = []
    parts: list[str] = []
    margin = ""
    for line in text.split("\n"):
        if parts:
            parts.append(line.strip())
            if line.rstrip(",") == f"{margin}}}":
                lines.append(margin + re.sub(r"(?<=[{[]) | (?=[]}])", "", " ".join(parts)))
                parts = []
        elif line.endswith("  {"):  # an element of an array: only sites are objects in arrays
            parts, margin = ["{"], line[:-1]
        else:
            lines.append(line)
    return "\n".join(lines)


def _misplaced(path: Path, environment: Environment, key: str) -> BaselineError:
    return BaselineError(
        f"baseline {path} was recorded for {environment.key}, not for {key}; move it to the "
        "folder of its environment"
    )


def _damaged(path: Path, problem: str) -> BaselineError:
    return BaselineError(
        f"baseline {path} is damaged or not one of pytest-gpumem: {problem}; restore it from "
        "version control or delete it"
    )


def _unusable(verb: str, path: Path, error: OSError) -> BaselineError:
    reason = error.strerror or error
    return BaselineError(f"baseline {path} cannot be {verb}: {reason}; check {path.parent}")
