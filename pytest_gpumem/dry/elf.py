"""The names that a shared library takes from others, read from the file itself.

Source: "Tool Interface Standard: Executable and Linking Format", 1.2, with the 64-bit format of
the System V ABI, and symbol versioning as the Linux Standard Base describes it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian: x86-64 and aarch64."""
_DYNAMIC, _DYNSYM, _NEEDED_VERSIONS = 6, 11, 0x6FFFFFFE
"""Types of sections: SHT_DYNAMIC, SHT_DYNSYM, SHT_GNU_verneed."""
_NEEDED = 1
"""The tag DT_NEEDED."""
_UNDEFINED = 0
"""The index SHN_UNDEF of a symbol that another library has."""


class ElfError(ValueError):
    """An error for a file that is not a shared library for 64-bit Linux; the message names it."""


@dataclass(frozen=True)
class Imports:
    """The names that a shared library takes from others."""

    libraries: frozenset[str]
    """The libraries that it needs, ``libcudart.so.13``."""
    symbols: frozenset[str]
    """Names without their versions."""
    exported: frozenset[str]
    """Names that others can take from it."""
    versions: Mapping[str, frozenset[str]]
    """The version nodes that a library must have, by library."""


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int
    info: int


def imports_of(path: Path) -> Imports:
    """Return the names that the library at ``path`` takes from others; raises :class:`ElfError`."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ElfError(f"{path} is not a shared library for 64-bit Linux")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).imports()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        (offset,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        self._sections = [self._section(offset + size * index) for index in range(count)]

    def imports(self) -> Imports:
        return Imports(
            libraries=frozenset(self._libraries()),
            symbols=frozenset(self._symbols(exported=False)),
            exported=frozenset(self._symbols(exported=True)),
            versions=dict(self._versions()),
        )

    def _section(self, at: int) -> _Section:
        _, kind, _, _, offset, size, link, info, _, _ = struct.unpack_from(
            "<IIQQQQIIQQ", self._data, at
        )
        return _Section(kind, offset, size, link, info)

    def _of_kind(self, kind: int) -> Iterator[tuple[_Section, _Section]]:
        """Yield the sections of a type, each with that of its strings."""
        for section in self._sections:
            if section.kind == kind:
                yield section, self._sections[section.link]

    def _libraries(self) -> Iterator[str]:
        for section, strings in self._of_kind(_DYNAMIC):
            for at in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<QQ", self._data, at)
                if tag == _NEEDED:
                    yield self._text(strings, value)

    def _symbols(self, *, exported: bool) -> Iterator[str]:
        for section, strings in self._of_kind(_DYNSYM):
            content = self._data[section.offset : section.offset + section.size]
            for name, _, _, index, _, _ in struct.iter_unpack("<IBBHQQ", content):
                if (index != _UNDEFINED) == exported and name:
                    yield self._text(strings, name)

    def _versions(self) -> Iterator[tuple[str, frozenset[str]]]:
        for section, strings in self._of_kind(_NEEDED_VERSIONS):
            at = section.offset
            for _ in range(section.info):
                _, count, file, first, following = struct.unpack_from("<HHIII", self._data, at)
                yield self._text(strings, file), frozenset(self._nodes(strings, at + first, count))
                at += following

    def _nodes(self, strings: _Section, at: int, count: int) -> Iterator[str]:
        for _ in range(count):
            _, _, _, name, following = struct.unpack_from("<IHHII", self._data, at)
            yield self._text(strings, name)
            at += following

    def _text(self, strings: _Section, offset: int) -> str:
        start = strings.offset + offset
        return self._data[start : self._data.find(b"\0", start)].decode()
