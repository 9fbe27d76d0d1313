"""PYTORCH_CUDA_ALLOC_CONF: its keys and accepted values by torch version.

Errors have the messages of torch 2.10 and later. Sources: c10/cuda/CUDAAllocatorConfig.cpp,
c10/core/AllocatorConfig.cpp; the messages were read from torch 2.11 and 2.15 at run time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pytest_gpumem.allocator import releases
from pytest_gpumem.allocator.blocks import DIVISION_SLOTS, LARGE_SEGMENT, MIN_LARGE_ALLOC
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.releases import NEWEST, OLDEST, Version
from pytest_gpumem.quoting import MOST, printable, quoted
from pytest_gpumem.sizes import GIB, MIB


class SettingsError(AllocatorError):
    """An allocator configuration string that torch rejects, with torch's message."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, MOST))

    settings: AllocatorSettings | None = None
    """The settings read before the error: torch keeps them."""


class Reserve(NamedTuple):
    """``expandable_segments_reserve`` (2.15): addresses of a segment, in GiB or as a fraction."""

    value: float
    is_fraction: bool


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings in a configuration string; sizes in bytes. The defaults are torch's."""

    conf: str = ""
    version: Version = (2, 13)
    max_split_size: int | None = None
    """``None`` for unlimited."""
    max_non_split_rounding: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    """0 turns it off."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_SLOTS
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    graph_capture_record_stream_reuse: bool = False
    release_lock_on_cudamalloc: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_cuda_host_register: bool = False
    pinned_max_round_threshold: int | None = None
    pinned_max_cached_size: int | None = None
    backend: str = "native"
    expandable_segments_reserve: Reserve | None = None

    @classmethod
    def parse(
        cls, conf: str | None, version: Version = (2, 13), previous: AllocatorSettings | None = None
    ) -> AllocatorSettings:
        """Read a configuration string as that torch version does.

        ``previous`` are the settings of a process that reads another string while it runs: some
        keys are reset to their defaults then, the rest is kept.

        Raises ``SettingsError``: an unknown key or a bad value, in that version's words.
        """
        if not OLDEST <= version <= NEWEST:
            raise SettingsError(
                f"torch {version[0]}.{version[1]} is not known to the simulated allocator;"
                f" known are {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}."
            )
        return _Parser(conf or "", version, previous).settings()

    def address_space(self, total_memory: int) -> int:
        """Return the bytes of addresses that a new expandable segment reserves: at most 9/8."""
        most = total_memory + total_memory // 8
        if (reserve := self.expandable_segments_reserve) is None:
            return most
        exact = reserve.value * (total_memory if reserve.is_fraction else GIB)
        return int(min(exact, float(most)))


class _Parser:
    """A parser of one string for one torch version."""

    def __init__(self, conf: str, version: Version, previous: AllocatorSettings | None) -> None:
        self.generic = version >= releases.GENERIC_CONFIG
        found = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", conf))
        self.tokens: list[str] = [*found, ""]  # the empty one is the end
        self.index = 0
        self.previous = previous
        self.result = AllocatorSettings(conf=conf, version=version)
        if previous is not None:
            self.result = replace(
                previous,
                conf=conf,
                # parseArgs resets these, the rounding only since 2.10.
                max_split_size=None,
                max_non_split_rounding=previous.large_segment_size
                if self.generic
                else previous.max_non_split_rounding,
                garbage_collection_threshold=0.0,
                roundup_power2_divisions=(0,) * DIVISION_SLOTS,
            )

    def settings(self) -> AllocatorSettings:
        try:
            self._read_large_segment()
            while key := self.tokens[self.index]:
                first, read = _KEYS.get(key, (None, None))
                if first is None or read is None or self.result.version < first:
                    raise self._unknown(key)
                self.index += 1
                self._expect(":")
                value, name = read(self, key), key.removesuffix("_mb")
                if value is not None and name in AllocatorSettings.__dataclass_fields__:
                    self.result = replace(self.result, **{name: value})
                if self.tokens[self.index] == ":":
                    raise self._unknown(self.tokens[self.index + 1] or ":")
                if self.tokens[self.index]:
                    self._expect(",")
        except SettingsError as error:
            error.settings = self.result
            raise
        return self.result

    def _read_large_segment(self) -> None:
        """Read this key before the others, as since 2.11: it is the minimum and default of two."""
        key = "large_segment_size_mb"
        if key not in self.tokens or self.result.version < releases.LARGE_SEGMENT_FIRST:
            return
        self.index = self.tokens.index(key) + 1
        self._expect(":")
        size = self._integer() * MIB
        if size <= MIN_LARGE_ALLOC:
            raise SettingsError("CachingAllocator option large_segment_size_mb must be > 10 MB")
        self.result = replace(self.result, large_segment_size=size, max_non_split_rounding=size)
        self.index = 0

    def _next(self) -> str:
        token = self.tokens[self.index]
        if not token:
            raise SettingsError(
                f"The allocator settings {quoted(self.result.conf)} end where a value is expected."
            )
        self.index += 1
        return token

    def _skip(self, token: str) -> bool:
        """Skip the next token if it is ``token``; return whether it was."""
        found = self.tokens[self.index] == token
        self.index += found
        return found

    def _expect(self, token: str) -> None:
        if self._skip(token):
            return
        raise SettingsError(
            f"Expected '{token}' at index {self.index} in ConfigTokenizer but got"
            f" '{self.tokens[self.index]}'"
        )

    def _unknown(self, key: str) -> SettingsError:
        return SettingsError(f"Unrecognized key '{key}' in Accelerator allocator config.")

    def _integer(self) -> int:
        """Read an integer like std::stoull: text after the digits is ignored."""
        digits = re.match(r"[+-]?[0-9]{1,20}(?![0-9])", self._next())
        if digits is None:  # or, as for std::out_of_range, too many of them
            raise SettingsError("stoull")
        return int(digits.group())

    def _number(self) -> float:
        """Read a number like std::stod: text after the number is ignored."""
        pattern = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)"
        number = re.match(pattern, self._next(), re.IGNORECASE)
        if number is None:
            raise SettingsError("stod")
        return float(number.group())

    # The readers of ``_KEYS``.

    def flag(self, key: str) -> bool:
        text = self._next()
        if text in ("True", "False"):
            return text == "True"
        raise SettingsError(
            f"Expected 'True' or 'False' at index {self.index - 1} in ConfigTokenizer"
            f" but got '{text}'"
        )

    def large_segment(self, key: str) -> None:
        self._integer()  # it has been read

    def segment(self, key: str) -> None:
        if self._integer() <= 0:
            raise SettingsError("Pinned reserve segment size has to be greater than 0")

    def split_size(self, key: str) -> int:
        megabytes = self._integer()
        least = self.result.large_segment_size // MIB + (not self.generic)
        if megabytes < least:
            raise SettingsError(f"CachingAllocator option {key} too small, must be >= {least}")
        return megabytes * MIB

    def threshold(self, key: str) -> float:
        value = self._number()
        if not 0.0 < value < 1.0:
            raise SettingsError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
        return value

    def fraction(self, key: str) -> float:
        value = self._number()
        if not 0.0 <= value <= 1.0:
            raise SettingsError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
        return value

    def backend(self, key: str) -> str:
        value = self._next()
        if value not in ("native", "cudaMallocAsync"):
            raise SettingsError("Unknown allocator backend, options are native and cudaMallocAsync")
        if self.previous is not None and value != self.previous.backend:
            raise SettingsError(
                "Allocator backend parsed at runtime != allocator backend parsed at load time,"
                f" {value} != {self.previous.backend}"
            )
        return value

    def threads(self, key: str) -> int:
        threads = self._integer()
        if not _is_power_of_two(threads):
            raise SettingsError(f"Number of register threads has to be power of 2, got {threads}")
        if threads > 128:
            raise SettingsError(
                f"Number of register threads should be less than or equal to 128, got {threads}"
            )
        return threads

    def reserves(self, key: str) -> None:
        """Check ``[class:value,...]``, without effect: only C++ code puts streams into classes."""
        self._expect("[")
        while self._next() != "]":
            self._expect(":")
            _reserve(self._next())
            self._skip(",")

    def divisions_of(self, key: str) -> tuple[int, ...]:
        if self._skip("["):
            return self._division_list()
        value = self._integer()
        if not _is_power_of_two(value):
            raise SettingsError("For roundups, the divisions has to be power of 2 ")
        return (value,) * DIVISION_SLOTS

    def _division_list(self) -> tuple[int, ...]:
        """Read ``[64:8,128:4,>:2]``: the first pair also fills the slots below it.

        ``>`` fills the slots above the last one written; up to 2.9 that one too.
        """
        slots = [0] * DIVISION_SLOTS
        last, first = 0, True
        while not self._skip("]"):
            begin, end = last + 1 if self.generic else last, DIVISION_SLOTS
            if not self._skip(">"):
                megabytes = self._integer()
                if not _is_power_of_two(megabytes):
                    raise SettingsError("For roundups, the intervals have to be power of 2 ")
                last = min(megabytes.bit_length() - 1, DIVISION_SLOTS - 1)
                begin, end = 0 if first else last, last + 1
            self._expect(":")
            value = self._integer()
            if value and not _is_power_of_two(value):
                raise SettingsError(
                    "For roundups, the divisions has to be power of 2 or 0 to disable roundup "
                )
            slots[begin:end] = [value] * (end - begin)
            first = False
            if self.tokens[self.index] not in ("]", ""):
                self._expect(",")
        return tuple(slots)


def _reserve(text: str) -> Reserve | None:
    """Read a fraction or ``40G`` (``parseReserveSpec`` of c10/cuda/CUDAAllocatorConfig.cpp).

    Anything else is ignored with a warning, as in torch.
    """
    found = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)([Gg]?)", text)
    if found is None or float(found[1]) <= 0:
        warnings.warn(
            f"Ignoring invalid expandable-segment reserve value '{printable(text, MOST)}' in"
            " PYTORCH_CUDA_ALLOC_CONF (expected a positive, finite fraction like 0.5 or an"
            " absolute size like 40G); using default.",
            stacklevel=2,
        )
        return None
    return Reserve(float(found[1]), is_fraction=not found[2])


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


_KEYS: dict[str, tuple[Version, Callable[[_Parser, str], Any]]] = {
    "backend": (OLDEST, _Parser.backend),
    "max_split_size_mb": (OLDEST, _Parser.split_size),
    "max_non_split_rounding_mb": (OLDEST, _Parser.split_size),
    "garbage_collection_threshold": (OLDEST, _Parser.threshold),
    "roundup_power2_divisions": (OLDEST, _Parser.divisions_of),
    "expandable_segments": (OLDEST, _Parser.flag),
    "release_lock_on_cudamalloc": (OLDEST, _Parser.flag),
    "pinned_use_cuda_host_register": (OLDEST, _Parser.flag),
    "pinned_num_register_threads": (OLDEST, _Parser.threads),
    "pinned_use_background_threads": (OLDEST, _Parser.flag),
    "graph_capture_record_stream_reuse": ((2, 9), _Parser.flag),
    "pinned_reserve_segment_size_mb": ((2, 10), _Parser.segment),
    "per_process_memory_fraction": ((2, 10), _Parser.fraction),
    "large_segment_size_mb": ((2, 11), _Parser.large_segment),
    "throw_on_cudamalloc_oom": ((2, 12), _Parser.flag),
    "pinned_free_catch_all": ((2, 12), _Parser.flag),
    "pinned_max_round_threshold_mb": ((2, 13), lambda parser, key: parser._integer() * MIB),
    "pinned_max_cached_size_mb": ((2, 13), lambda parser, key: parser._integer() * MIB),
    "expandable_segments_reserve": ((2, 15), lambda parser, key: _reserve(parser._next())),
    "expandable_segments_reserve_by_class": ((2, 15), _Parser.reserves),
}
"""Key -> the first release that has it, and how its value is read.

It is kept where the settings have a field of that name; other keys have no effect on the device.
"""
