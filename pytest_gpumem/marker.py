"""``@pytest.mark.gpumem(...)``: the expectations of a test's author, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

from pytest_gpumem.quoting import MOST, printable, quoted
from pytest_gpumem.sizes import Size, Tolerance, parse_size, parse_tolerance, written_size

if TYPE_CHECKING:
    import pytest

WORST = "worst"
"""The value of ``rank`` for a test that runs as all ranks and is judged by the highest peak."""

MOST_RANKS = 1 << 20
"""The most ranks of one test; a larger number is a typing error."""

GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"
"""The values of ``qos``, the quality of service on a shared device."""


@dataclass(frozen=True)
class Expectation:
    """The limits and settings of a test; sizes in bytes, ``None`` for no limit.

    Limits that were written with a unit are :class:`~pytest_gpumem.sizes.Size`.
    """

    max: int | None = None
    """Limit of the peak allocated bytes charged to the test."""
    max_reserved: int | None = None
    """Limit of the peak reserved bytes charged to the test."""
    max_leak: int | None = None
    """Limit of the bytes still allocated after the test and a garbage collection."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Limit of the peak allocated bytes, by phase."""
    baseline: bool | None = None
    """True: a stored baseline must exist; None: compare if one exists; False: never compare."""
    predict: Tolerance | None = None
    """Largest difference of a peak from that on a simulated device of the same model."""
    tolerance: Tolerance | None = None
    """Excess over the baseline that passes; by default none when simulated, 1% + 1MiB on a GPU."""
    warmup: int = 0
    """Number of runs of the body before it is measured."""
    repeat: int = 1
    """Number of runs after those; the last one counts."""
    gpu: tuple[str, ...] = ()
    """Models of the catalogue to simulate, one test id for each."""
    min_memory: int | None = None
    """The test is skipped on a device with less total memory."""
    quota: int | None = None
    """Bytes of the device that the process may reserve while the test runs."""
    elastic: bool = False
    """Memory above the quota is borrowed from a shared device if the quota is too small."""
    exclusive: bool = False
    """Nothing else may run on a shared device beside the test."""
    qos: str = GUARANTEED
    """On a shared device, opportunistic tests run after guaranteed ones."""
    priority: int = 0
    """On a shared device, tests of higher priority run first."""
    isolate: bool = False
    """The test runs in a separate process."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks, with one test id for each: a simulated test is one of the ranks; with as
    many GPUs, each rank is a process."""
    rank: int | str | None = None
    """The rank of the test, or ``"worst"``: the rank with the highest peak. ``None`` is the first
    rank if simulated, and the worst one where all ranks run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: builtin types, tolerances as text, ranks only if there are any."""
        data = {each.name: _builtin(getattr(self, each.name)) for each in fields(self)}
        if not self.ranks:
            del data["ranks"], data["rank"]
        elif self.rank is None:
            data["rank"] = 0
        return data


def _builtin(value: Any) -> Any:
    """Return a field's value as builtin types; a size loses the text it was written as."""
    match value:
        case Size():
            return int(value)
        case Tolerance():
            return str(value)
        case tuple():
            return list(value)
        case Mapping():
            return {name: int(limit) for name, limit in value.items()}
        case _:
            return value


def expectation_of(
    markers: Iterable[pytest.Mark], defaults: Mapping[str, Any] = MappingProxyType({})
) -> Expectation:
    """Return the expectation of a test from its markers, closest first.

    For each keyword the closest marker wins; ``defaults`` (values by keyword, as
    :func:`parse_keyword` returns them) apply without any. A keyword that the closest marker gives
    as ``None`` counts as not given. Raises ``ValueError``.
    """
    merged = dict(defaults)
    for mark in reversed(list(markers)):
        merged.update(_keywords_of(mark))
    expectation = Expectation(**{key: value for key, value in merged.items() if value is not None})
    rank, ranks = expectation.rank, expectation.ranks
    if rank and not ranks:
        raise ValueError(f"gpumem marker: rank={rank!r} needs ranks=, the number of ranks")
    if isinstance(rank, int) and ranks and rank >= min(ranks):
        raise ValueError(
            f"gpumem marker: rank={rank} is none of {min(ranks)}; write an int from 0 to "
            f"{min(ranks) - 1}, or {WORST!r}"
        )
    return expectation


def parse_keyword(keyword: str, value: object) -> Any:
    """Return ``value`` parsed for the field ``keyword`` of :class:`Expectation`.

    Raises a ``ValueError`` whose sentence begins with the value and lists accepted ones.
    """
    return _PARSERS[keyword][1](value)


def _keywords_of(mark: pytest.Mark) -> dict[str, Any]:
    given = dict(mark.kwargs)
    if len(mark.args) > 1:
        raise ValueError(
            f"gpumem marker: {len(mark.args)} positional arguments {quoted(mark.args)}, "
            "but only max= may be given without its keyword"
        )
    if mark.args:
        if "max" in given:
            raise ValueError(
                f"gpumem marker: {quoted(mark.args[0])} and max={quoted(given['max'])} are both "
                "the peak limit; give one of them"
            )
        given["max"] = mark.args[0]
    return {keyword: _parse_named(keyword, value) for keyword, value in given.items()}


def _parse_named(keyword: str, value: object) -> Any:
    if keyword not in _PARSERS:
        from difflib import get_close_matches

        close = get_close_matches(keyword, _PARSERS, n=1)
        suggestion = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"gpumem marker: unknown keyword {printable(keyword, MOST)}={quoted(value)}; "
            f"{suggestion}accepted: {', '.join(_PARSERS)}"
        )
    try:
        return None if value is None else parse_keyword(keyword, value)
    except ValueError as error:
        raise ValueError(f"gpumem marker: {keyword}={error}") from None


def _phases(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f'{quoted(value)} is not a dict of sizes by phase, like {{"forward": "1GB"}}'
        )
    limits = {}
    for name, limit in value.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{quoted(value)} names a phase {quoted(name)}; a name is a text, not empty"
            )
        try:
            limits[name] = written_size(limit)
        except ValueError as error:
            raise ValueError(f"{quoted(value)}: for {quoted(name)}, {error}") from None
    return limits


def _gpus(value: object) -> tuple[str, ...]:
    # Most test suites name no GPU, and all of them import this module if the plugin is installed.
    from pytest_gpumem.simulated.gpu.catalogue import GpuError, find_machine

    names = [value] if isinstance(value, str) else value
    names = names if isinstance(names, list | tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f'{quoted(value)} is not a GPU model; write one like "A100-40GB", or a list'
        )
    models = tuple(find_machine(name).name for name in names)
    for model in models:
        if models.count(model) > 1:
            raise GpuError(f"{quoted(value)} names {model} twice; name each GPU model once")
    return models


def _ranks(value: object) -> tuple[int, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(is_int(number, 1, MOST_RANKS) for number in numbers):
        raise ValueError(
            f"{quoted(value)} is not a number of ranks; write an int from 1 to {MOST_RANKS:,}, or "
            "a list of them"
        )
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{quoted(value)} names a number of ranks twice; name each once")
    return tuple(numbers)


def is_int(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Return whether ``value`` is an int within these bounds, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _unchanged_if(accepts: Callable[[Any], bool], otherwise: str) -> Callable[[Any], Any]:
    """Return a parser that returns accepted values unchanged; ``otherwise`` ends its error."""

    def parse(value: object) -> Any:
        if accepts(value):
            return value
        raise ValueError(f"{quoted(value)} {otherwise}")

    return parse


def _count(least: int) -> tuple[str, Callable[[Any], Any]]:
    form = f"int from {least} up"
    sentence = f"is not a number of runs; write an {form}"
    return f"An {form}.", _unchanged_if(lambda value: is_int(value, least), sentence)


_LIMIT = 'A size: `"2GB"`, or bytes.', written_size
_SIZE = 'A size: `"20GiB"`, or bytes.', parse_size
_TOLERANCE = 'A tolerance: `"2% + 1MiB"`.', parse_tolerance
_FLAG = (
    "`True` or `False`.",
    _unchanged_if(lambda value: isinstance(value, bool), "is neither True nor False"),
)

_PARSERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "max": _LIMIT,
        "max_reserved": _LIMIT,
        "max_leak": _LIMIT,
        "phases": ('A dict of sizes: `{"forward": "1GB"}`.', _phases),
        "baseline": _FLAG,
        "predict": _TOLERANCE,
        "tolerance": _TOLERANCE,
        "warmup": _count(0),
        "repeat": _count(1),
        "gpu": ('A model, or a list of them: `"A100-40GB"`, `"A100-80GB*2"`.', _gpus),
        "min_memory": _SIZE,
        "quota": _SIZE,
        "elastic": _FLAG,
        "exclusive": _FLAG,
        "qos": (
            f'`"{GUARANTEED}"` or `"{OPPORTUNISTIC}"`.',
            _unchanged_if(
                lambda value: value in (GUARANTEED, OPPORTUNISTIC),
                f"is neither {GUARANTEED!r} nor {OPPORTUNISTIC!r}",
            ),
        ),
        "priority": (
            "An int.",
            _unchanged_if(is_int, "is not a priority; write an int, 0 where none is given"),
        ),
        "isolate": _FLAG,
        "ranks": ("A number of ranks, or a list of them: `8`.", _ranks),
        "rank": (
            f'A rank: an int from 0 up, or `"{WORST}"`.',
            _unchanged_if(
                lambda value: value == WORST or is_int(value, 0),
                f"is not a rank; write an int from 0 up, or {WORST!r}",
            ),
        ),
    }
)
"""The values that each keyword accepts, and their parser."""
