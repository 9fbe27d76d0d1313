"""What torch takes from NVIDIA's libraries, with ones that the machine's compiler makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gpumem.dry import build
from pytest_gpumem.dry.build import missing_tool

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def library(folder: Path, name: str, code: str, *options: str) -> Path:
    """Compile ``code`` to a shared library."""
    source, path = folder / f"{name.partition('.')[0]}.c", folder / name
    source.write_text(code)
    options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path), str(source), *options)
    subprocess.run(["cc", *options], check=True)
    return path


def test_libraries_symbols_and_versions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.15.0+cu132'\ncuda: str = '13.2'\n")
    (tmp_path / "map").write_text("LIBCUDART_13 { global: cudaMalloc; };\n")
    script = f"-Wl,--version-script={tmp_path / 'map'}"
    cudart = library(tmp_path, "libcudart.so.13", "int cudaMalloc(void) { return 1; }", script)
    library(
        folder / "lib",
        "libtorch_cuda.so",
        "int cudaMalloc(void); int ncclSend(void); int absent(void); int cuOwn(void);"
        "int cudaAll(void) { return cudaMalloc() + ncclSend() + absent() + cuOwn(); }",
        str(cudart),
    )
    library(folder / "lib", "libtorch_python.so", "int cuOwn(void) { return 1; }")
    monkeypatch.setattr(build, "_folder", lambda: folder)

    found = build.installed_build()

    assert found.symbols == {"cudaMalloc", "ncclSend"}
    assert found.libraries == {
        "libcudart.so.13": {"LIBCUDART_13"},
        "libcuda.so.1": set(),
        "libnvidia-ml.so.1": set(),
    }


@pytest.mark.parametrize("tool", ["objdump", "nm"])
def test_a_tool_that_is_missing_is_named(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {"cc", "objdump", "nm"} - {tool}:
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert missing_tool() == tool
    with pytest.raises(build.DryError, match=f"and this machine has no {tool}: install"):
        build.run([tool, "-V"])
