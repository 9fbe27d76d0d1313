"""What a library takes from others, against libraries that the machine's compiler makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gpumem.dry.elf import ElfError, imports_of

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def library(folder: Path, name: str, code: str, *options: str) -> Path:
    """Compile ``code`` to a shared library."""
    source, path = folder / f"{name}.c", folder / name
    source.write_text(code)
    options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path), str(source), *options)
    subprocess.run(["cc", *options], check=True)
    return path


def test_libraries_symbols_and_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("LIBFIRST_2 { global: first; };\n")
    script = f"-Wl,--version-script={tmp_path / 'map'}"
    first = library(tmp_path, "libfirst.so.2", "int first(void) { return 1; }", script)
    second = library(
        tmp_path,
        "libsecond.so",
        "int first(void); int absent(void); int second(void) { return first() + absent(); }",
        str(first),
    )

    found = imports_of(second)

    assert "libfirst.so.2" in found.libraries
    assert {"first", "absent"} <= found.symbols
    assert "second" in found.exported
    assert "second" not in found.symbols
    assert found.versions["libfirst.so.2"] == {"LIBFIRST_2"}


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    script = tmp_path / "libscript.so"
    script.write_text("GROUP ( libc.so.6 )")

    with pytest.raises(ElfError, match=r"libscript\.so is not a shared library"):
        imports_of(script)
