"""Command line and ini file, read once into one frozen :class:`Settings`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import pytest

from pytest_gpumem import option_values as accepted
from pytest_gpumem.device.host_gpus import resolved
from pytest_gpumem.option_values import DEVICE_FORMS, REPORT_FORMS, as_marker, one_of
from pytest_gpumem.quoting import printable, quoted

if TYPE_CHECKING:
    from pytest_gpumem.option_values import DeviceChoice, Quota, ReportTarget
    from pytest_gpumem.sizes import Tolerance

T = TypeVar("T")

_PREFIX = "gpumem_"

MARKER = (
    "gpumem(max, *, max_reserved, max_leak, phases, baseline, predict, tolerance, warmup, repeat, "
    "gpu, min_memory, quota, elastic, exclusive, qos, priority, isolate, ranks, rank): measure the "
    "test's GPU memory and fail it where it exceeds what is given."
)
"""The line for ``config.addinivalue_line("markers", ...)``."""


def _one_of(form: str, help_text: str) -> tuple[str, Callable[[Any], Any], str]:
    return form, one_of(*form.split("|")), help_text


VALUES_LIMIT = 30.0
"""The default limit, in seconds, on computing real values in a second run."""

_FLAGS = {
    "gpumem_all": "measure and report unmarked tests too, without judging them",
    "gpumem_share": "let several workers share a GPU: each test waits until its memory is free",
    "gpumem_prune_baselines": "delete baselines of tests that no longer exist",
    "gpumem_require_baselines": (
        "fail every marked test that has no baseline, not only those that say baseline=True (for "
        "these it is always on when CI is set)"
    ),
}
_VALUE_FLAGS = {
    "gpumem_update_baselines": (("all", "new"), "store what was measured as the new baselines"),
    "gpumem_history": (
        ("python", "all"),
        "record the source lines of allocations (always on when simulated)",
    ),
}
_VALUES: Mapping[str, tuple[str, Callable[[Any], Any] | None, str]] = {
    "gpumem_device": (
        DEVICE_FORMS,
        accepted.device_choice,
        "where marked tests run; dry: on torch's own CUDA code, without a GPU (default: auto, a "
        "GPU if there is one, else dry, else sim)",
    ),
    "gpumem_sim_scope": _one_of(
        "test|session",
        "whether the simulated or dry GPU is visible only in marked tests, or also while conftests "
        "and modules are imported (default: test)",
    ),
    "gpumem_sim_values": _one_of(
        "auto|always|never",
        "compute real values on the CPU: in a second run of a test that needs them, or always "
        "(default: auto)",
    ),
    "gpumem_sim_values_limit": (
        "SECONDS",
        accepted.seconds,
        "how long a second run with real values may compute; longer ones are skipped (default: "
        "30; inf for no limit)",
    ),
    "gpumem_sim_stand_ins": _one_of(
        "auto|off",
        "let simulated tests import flash-attn where it is not installed, or not (default: auto)",
    ),
    "gpumem_sim_compile": _one_of(
        "auto|always|eager",
        "simulate what torch.compile makes, and run eagerly what cannot be followed; fail where it "
        "cannot; or run compiled code eagerly (default: auto)",
    ),
    "gpumem_explain": _one_of(
        "failed|always|never",
        "on a GPU, record where memory is allocated in a second run of a failing test, or in every "
        "test (default: failed, always where baselines are stored; a simulated GPU always does)",
    ),
    "gpumem_quota": (
        "SIZE|N%%|auto",
        accepted.process_quota,
        "what each worker may reserve of its GPU: a size, a share of the device, or auto, its part "
        "of a device that all workers share alike",
    ),
    "gpumem_share_timeout": (
        "SECONDS",
        accepted.seconds,
        "how long a test waits for memory on a shared GPU before it fails (default: 1800)",
    ),
    "gpumem_shard": (
        "K/N",
        accepted.shard_part,
        "run the Kth of N parts of the tests, which take about the same each",
    ),
    "gpumem_shard_by": (
        "FILE",
        None,
        "file with durations and memory of the tests: a JSON report, or a file of gpumem plan "
        "--output or of pytest-split (default: those of earlier runs, from pytest's cache)",
    ),
    "gpumem_baselines": ("DIR", None, "folder of the stored baselines (default: baselines)"),
    "gpumem_tolerance": (
        "TOLERANCE",
        as_marker("tolerance"),
        'how far a baseline may be exceeded, like "1%% + 1MiB"',
    ),
    "gpumem_rows": (
        "N|all",
        accepted.row_count,
        "how many tests the table shows (default: 24, with -v all)",
    ),
    "gpumem_sort": _one_of("peak|leaked|over|name", "the table's order (default: as they ran)"),
    "gpumem_loop_phases": _one_of(
        "folded|numbered",
        "phases that are entered again: one phase, or each time also one inside it, forward_1, "
        "forward_2 and so on (default: folded)",
    ),
    "gpumem_artifacts": ("DIR", None, "write memory snapshots of failing tests to this folder"),
}
"""The form of each option's value, its parser (``None`` for a path) and its help."""
_MARKER_DEFAULTS: Mapping[str, Callable[[Any], Any]] = {
    "gpumem_max": as_marker("max"),
    "gpumem_max_reserved": as_marker("max_reserved"),
    "gpumem_max_leak": as_marker("max_leak"),
    "gpumem_predict": as_marker("predict"),
    "gpumem_warmup": as_marker("warmup", accepted.run_count),
    "gpumem_repeat": as_marker("repeat", accepted.run_count),
    "gpumem_gpu": accepted.gpu_models,
    "gpumem_min_memory": as_marker("min_memory"),
}
"""Ini names that set a default of a marker's keyword, and the parsers of their values."""


_FURTHER = ("gpumem_report", "gpumem_baseline", "gpumem_phases")
"""Settings that are registered one by one."""


class Settings(NamedTuple):
    """The settings of command line and ini file, by ini name; paths are absolute.

    Not a dataclass: defining one would take a millisecond of every run.
    """

    device: DeviceChoice
    baselines: Path
    sim_scope: Literal["test", "session"] = "test"
    sim_values: Literal["auto", "always", "never"] = "auto"
    sim_values_limit: float = VALUES_LIMIT
    """The most seconds of computing in a second run."""
    sim_stand_ins: Literal["auto", "off"] = "auto"
    """Whether simulated tests may import flash-attn where it is not installed."""
    sim_compile: Literal["auto", "always", "eager"] = "auto"
    all: bool = False
    update_baselines: Literal["all", "new"] | None = None
    prune_baselines: bool = False
    require_baselines: bool = False
    tolerance: Tolerance | None = None
    reports: tuple[ReportTarget, ...] = ()
    history: Literal["python", "all"] | None = None
    """The recorded stacks; ``None`` for the plugin's choice."""
    explain: Literal["failed", "always", "never"] = "failed"
    artifacts: Path | None = None
    rows: int | None = None
    """The number of tests in the table; ``None`` for the plugin's choice."""
    sort: Literal["peak", "leaked", "over", "name"] | None = None
    loop_phases: Literal["folded", "numbered"] = "folded"
    share: bool = False
    """Whether tests share devices with other processes, and wait for memory."""
    share_timeout: float = 1800.0
    """The most seconds that a test waits for memory."""
    shard: tuple[int, int] | None = None
    """The part of the tests to run, from 1, and the number of parts."""
    shard_by: Path | None = None
    """The file with durations and memory of tests, from which shards are computed."""
    quota: Quota | None = None
    """The limit on the bytes that each process reserves of its device."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """The marker's defaults, parsed, by keyword: for ``expectation_of``."""


def add_options(parser: pytest.Parser, given: Sequence[str] = ()) -> None:
    """Register every option and its ini twin; ``given`` is the command line."""
    group = parser.getgroup("gpumem", "GPU memory (pytest-gpumem)")
    for name, (form, _, help_text) in _VALUES.items():
        group.addoption(_option(name), metavar=form, dest=name, help=help_text)
        parser.addini(name, f"{form}: {help_text}".replace("%%", "%"), default=None)
    name, form = "gpumem_report", REPORT_FORMS.replace(" or ", "|") + "|off"
    help_text = (
        "write a report; may be given several times (on GitHub and GitLab one is written by "
        "itself; off: none but those given)"
    )
    group.addoption(_option(name), action="append", metavar=form, dest=name, help=help_text)
    parser.addini(name, f"{form}: {help_text}", type="linelist", default=None)
    for name, help_text in _FLAGS.items():
        group.addoption(_option(name), action="store_true", default=None, dest=name, help=help_text)
        parser.addini(name, help_text, type="bool", default=None)
    for name, (choices, help_text) in _VALUE_FLAGS.items():
        # Other values are refused when the settings are read: argparse's own message would
        # name an ignored explicit argument.
        others = [word for word in given if word.startswith(f"{_option(name)}=")]
        accepted = [f"{_option(name)}={choice}" for choice in choices]
        strings = [_option(name), *dict.fromkeys([*accepted, *others])]
        group.addoption(
            *strings, action=_ValueFlag, const=choices[0], default=None, dest=name, help=help_text
        )
        parser.addini(name, f"{'|'.join(choices)}: {help_text}", default=None)
    for name in _MARKER_DEFAULTS:
        form = ", models separated by commas" if name == "gpumem_gpu" else ""
        help_text = f"default of the marker's {name.removeprefix(_PREFIX)}{form}"
        parser.addini(name, help_text, default=None)
    parser.addini("gpumem_baseline", "default of the marker's baseline", type="bool", default=None)
    help_text = "defaults of the marker's phases, one NAME = SIZE a line"
    parser.addini("gpumem_phases", help_text, type="linelist", default=None)


def settings_from(config: pytest.Config, options: argparse.Namespace | None = None) -> Settings:
    """Return the settings; the command line wins over the ini file.

    ``options`` are those of the command line, if ``config`` does not have them yet.

    Raises ``pytest.UsageError`` with one sentence that names the option or ini key, the value and
    the accepted ones.
    """
    _check_names(config, {*_VALUES, *_FLAGS, *_VALUE_FLAGS, *_MARKER_DEFAULTS, *_FURTHER})
    reader = _Reader(config, options or config.option)
    given = {
        **{name: reader.value(name, parse) for name, (_, parse, _) in _VALUES.items()},
        **{name: reader.flag(name) for name in _FLAGS},
        **{name: reader.one(name, one_of(*each)) for name, (each, _) in _VALUE_FLAGS.items()},
    }
    defaults = {
        **{name: reader.one(name, parse) for name, parse in _MARKER_DEFAULTS.items()},
        "gpumem_phases": reader.one("gpumem_phases", as_marker("phases", accepted.phase_limits)),
        "gpumem_baseline": reader.flag("gpumem_baseline"),
        "gpumem_tolerance": given["gpumem_tolerance"],
    }
    baselines = given["gpumem_baselines"] or config.rootpath / "baselines"
    values = {
        "require_baselines": bool(os.getenv("CI")),
        "explain": "always" if given["gpumem_update_baselines"] else "failed",
        **_by_name(given),
        "device": resolved(given["gpumem_device"] or accepted.device_choice("auto"), baselines),
        "baselines": baselines,
    }
    return Settings(
        **values, reports=reader.reports(), defaults=MappingProxyType(_by_name(defaults))
    )


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, without the prefix of their names."""
    return {name.removeprefix(_PREFIX): value for name, value in given.items() if value is not None}


def _check_names(config: pytest.Config, known: Collection[str]) -> None:
    """Raise ``pytest.UsageError`` for a setting with this plugin's prefix that is not ``known``.

    A misspelt limit would check nothing, and its tests would pass.
    """
    # Private since pytest 9, which has no other access to names that are not registered.
    given: Iterable[str] | None = getattr(config, "_inicfg", None)
    for name in config.inicfg if given is None else given:
        if name.startswith(_PREFIX) and name not in known:
            from difflib import get_close_matches

            # Without the common prefix, which makes all names similar.
            words = [word.removeprefix(_PREFIX) for word in known]
            close = get_close_matches(name.removeprefix(_PREFIX), words, n=1)
            meant = f"did you mean {_PREFIX}{close[0]}?" if close else "see pytest --help"
            where = config.inipath or "--override-ini"
            raise pytest.UsageError(
                f"{where}: {quoted(name)} is not a setting of pytest-gpumem; {meant}"
            )


class _ValueFlag(argparse.Action):
    """A flag that may carry a value, but only after ``=``.

    With ``nargs="?"``, the test path after a bare flag would become its value. So each accepted
    ``--flag=value`` is a separate option string, which argparse looks up before it splits at the
    ``=``; and so is a given one that will be refused later.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        _, _, value = (option_string or "").partition("=")
        setattr(namespace, self.dest, value or self.const)


class _Reader:
    """A reader of settings, command line before ini file, whose errors name the setting."""

    def __init__(self, config: pytest.Config, options: argparse.Namespace) -> None:
        self._config = config
        self._options = options

    def one(self, name: str, parse: Callable[[Any], T]) -> T | None:
        label, value = self._given(name)
        return None if value is None else _parsed(label, value, parse)

    def flag(self, name: str) -> bool | None:
        value: bool | None = self._given(name, "; write true or false")[1]
        return value

    def value(self, name: str, parse: Callable[[Any], Any] | None) -> Any:
        """Return a value, and without ``parse`` a path."""
        label, _ = self._given(name)
        return self.one(
            name, parse or (lambda value: accepted.usable_path(self._folder(label), value))
        )

    def reports(self) -> tuple[ReportTarget, ...]:
        label, values = self._given("gpumem_report")
        folder = self._folder(label)
        given = [
            _parsed(label, value, lambda v: accepted.report_target(v, folder))
            for value in values or ()
        ]
        asked = tuple(target for target in given if target is not None)
        return (*asked, *(() if None in given else accepted.reports_of_the_ci(asked)))

    def _given(self, name: str, forms: str = "") -> tuple[str, Any]:
        value = getattr(self._options, name, None)
        if value is not None:
            return _option(name), value
        # pytest raises a ValueError or TypeError for a value of another than the ini type.
        try:
            value = self._config.getini(name)
        except (ValueError, TypeError, pytest.UsageError) as error:
            raise pytest.UsageError(f"{name}: {error}{forms}") from None
        return name, None if value in ("", []) else value

    def _folder(self, label: str) -> Path:
        if label.startswith("--"):
            return self._config.invocation_params.dir
        inipath = self._config.inipath
        return self._config.rootpath if inipath is None else inipath.parent


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parsed(label: str, value: Any, parse: Callable[[Any], T]) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise pytest.UsageError(printable(f"{label}={error}")) from None
