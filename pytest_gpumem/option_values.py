"""The values of options and ini names, and the functions that parse them.

Parsers raise ``ValueError`` with a clause that quotes the value and lists accepted ones.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pytest_gpumem.quoting import quoted

GITLAB_FILE = "gpumem.md"
"""The report in GitLab's project folder, if no other one is requested."""

DEFAULT_GPU = "A100-40GB"

DEVICE_FORMS = "auto|cuda|cuda:N|dry|dry:MODEL[*N][,MODEL...]|sim|sim:MODEL[*N][,MODEL...]|off"

REPORT_KINDS = {"json": True, "html": True, "markdown": True, "github": False}
"""The reports that can be requested, and whether a path has to follow."""
REPORT_FORMS = " or ".join(f"{kind}:PATH" if path else kind for kind, path in REPORT_KINDS.items())


class DeviceChoice(NamedTuple):
    """The device that marked tests run on."""

    kind: Literal["auto", "cuda", "dry", "sim", "off"]
    index: int | None = None  # type: ignore[assignment]  # a field, not the method of tuples
    """The index of the CUDA device; ``None`` for the current one."""
    models: tuple[str, ...] = ()
    """Models to simulate, or of the dry device; empty if nothing can be simulated."""
    of_auto: bool = False
    """Whether ``auto`` has chosen the dry device."""
    not_dry: str = ""
    """Why ``auto`` has not chosen the dry device, if this build of torch supports it."""


class ReportTarget(NamedTuple):
    """A report to write."""

    kind: str
    """The kind, one of :data:`REPORT_KINDS`."""
    path: Path | None
    """The file or folder; ``None`` for kinds without one."""
    unasked: bool = False
    """Whether it was not requested; then it is written only if something was measured."""


class Quota(NamedTuple):
    """The quota of one process on its device; exactly one of the fields is set."""

    bytes: int | None = None
    share: float | None = None
    """A share of the device's memory, above 0 and up to 1."""
    auto: bool = False
    """Whether every worker of the run gets the same share."""

    def of(self, total: int, workers: int) -> int:
        """Return the bytes of the quota on a device of ``total`` bytes."""
        if self.bytes is not None:
            return self.bytes
        return int(total * (1 / workers if self.share is None else self.share))


def as_marker(
    keyword: str, read: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], Any]:
    """Return a function that calls ``read`` and parses the result as the marker's ``keyword``."""

    def parse(value: Any) -> Any:
        from pytest_gpumem.marker import parse_keyword

        return parse_keyword(keyword, read(value))

    return parse


def run_count(value: str) -> int | str:
    """Return a number of runs, or the text if it is no number."""
    number = re.fullmatch(r"\s*([0-9]{1,9})\s*", value)
    return int(number[1]) if number else value


gpu_models = as_marker("gpu", lambda value: [name.strip() for name in value.split(",")])
"""The function that returns the models of GPUs in a text, separated by commas."""


def phase_limits(lines: list[str]) -> dict[str, str]:
    """Return the limit of each phase from lines like ``forward = 1GB``."""
    limits: dict[str, str] = {}
    for line in lines:
        name, equals, size = (part.strip() for part in line.partition("="))
        if not equals or not name or name in limits:
            raise ValueError(
                f"{quoted(line)} is not a phase and its limit, each once: forward = 1GB"
            )
        limits[name] = size
    return limits


def usable_path(base: Path, value: str) -> Path:
    """Return the path ``value``, below ``base`` if it is relative."""
    if not value:
        raise ValueError(f"{quoted(value)} is not a folder; write its path")
    try:
        (base / value).lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, without permission, or with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{quoted(value)} cannot be used: {reason}; write another path") from None
    return base / value


def process_quota(value: str) -> Quota:
    """Return the quota: a size, a share or ``auto``."""
    from pytest_gpumem.sizes import parse_size

    text = value.strip()
    with suppress(ValueError):
        if text == "auto":
            return Quota(auto=True)
        if text.endswith("%"):
            share = float(text[:-1])
            if 0 < share <= 100:
                return Quota(share=share / 100)
        elif (size := parse_size(value)) > 0:
            return Quota(bytes=size)
    raise ValueError(
        f"{quoted(value)} is not a quota; write a size like 8GiB, a share like 25% or auto"
    )


def shard_part(value: str) -> tuple[int, int]:
    """Return the part's number and the number of parts: ``2/5``."""
    numbers = re.fullmatch(r"\s*([0-9]{1,6})/([0-9]{1,6})\s*", value)
    shard = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"{quoted(value)} is not a shard; write K/N with K from 1 to N, like 2/4")
    return shard


def one_of(*choices: Any) -> Callable[[str], Any]:
    """Return a function that accepts one of ``choices``."""

    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{quoted(value)} is not accepted; write {' or '.join(choices)}")
        return value

    return parse


def row_count(value: str) -> int:
    """Return a number of rows; ``all`` is a very large number."""
    if value.strip() == "all":
        return 10**9
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        raise ValueError(f"{quoted(value)} is not a number of rows; write one like 50, or all")
    return int(value)


def seconds(value: str) -> float:
    """Return a time in seconds."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{quoted(value)} is not a time; write seconds like 30 or 0.5, or inf")
    return seconds


def device_choice(value: str) -> DeviceChoice:
    """Return the device that marked tests run on."""
    match value.partition(":"):
        case ("auto" | "sim" | "dry" as kind, "", ""):
            return DeviceChoice(kind, models=(DEFAULT_GPU,))
        case ("cuda" | "off" as kind, "", ""):
            return DeviceChoice(kind)
        case ("cuda", _, index) if re.fullmatch(r"[0-9]{1,4}", index):
            return DeviceChoice("cuda", index=int(index))
        case ("sim" | "dry" as kind, _, models) if models:
            try:
                return DeviceChoice(kind, models=gpu_models(models))
            except ValueError as error:
                raise ValueError(f"{quoted(value)}: {error}") from None
    raise ValueError(f"{quoted(value)} is not a device; write {DEVICE_FORMS}")


def report_target(value: str, folder: Path) -> ReportTarget | None:
    """Return the report to write, ``None`` for ``off``."""
    kind, separator, path = value.partition(":")
    if value == "off":
        return None
    if REPORT_KINDS.get(kind) and path:
        return ReportTarget(kind, usable_path(folder, path))
    if REPORT_KINDS.get(kind) is False and not separator:
        return ReportTarget(kind, None)
    raise ValueError(f"{quoted(value)} is not a report; {REPORT_FORMS} is accepted, or off")


def reports_of_the_ci(asked: Sequence[ReportTarget]) -> tuple[ReportTarget, ...]:
    """Return the report that the CI system shows, unless it is requested already.

    GitHub sets GITHUB_ACTIONS, GitLab GITLAB_CI, both to "true" and in every job.
    """
    kinds = {target.kind for target in asked}
    if os.getenv("GITHUB_ACTIONS") == "true" and "github" not in kinds:
        return (ReportTarget("github", None, unasked=True),)
    folder = os.getenv("CI_PROJECT_DIR")
    if os.getenv("GITLAB_CI") == "true" and folder and "markdown" not in kinds:
        return (ReportTarget("markdown", Path(folder) / GITLAB_FILE, unasked=True),)
    return ()
