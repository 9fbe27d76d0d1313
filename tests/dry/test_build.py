"""The runtime is compiled once, without a warning, and says in a sentence what it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_gpumem.dry import build as build_module
from pytest_gpumem.dry.build import RUNTIME, built, built_for_installed
from pytest_gpumem.dry.elf import imports_of
from pytest_gpumem.dry.torch_build import DryError, TorchBuild

SOURCES = sorted((Path(build_module.__file__).parent / "source").glob("*.c"))

BUILD = TorchBuild(
    release="2.15.0+cu132",
    cuda=(13, 2),
    cudnn=(9, 26, 0),
    nccl=(2, 30, 7),
    libraries={
        "libcudart.so.13": frozenset({"libcudart.so.13"}),
        "libcuda.so.1": frozenset(),
    },
    symbols=frozenset({"cudaMalloc", "cublasSgemm_v2"}),
)

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="there is no C compiler for Linux"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@needs_compiler
@pytest.mark.parametrize("cuda", [12040, 13020])
def test_every_source_compiles_without_a_warning(tmp_path: Path, cuda: int) -> None:
    macros = (f"-DCUDA_VERSION={cuda}", "-DCUDNN_VERSION_PARTS=9,1,0", "-DNCCL_VERSION=22105")
    options = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *macros)
    done = subprocess.run(
        ["cc", *options, *map(str, SOURCES)], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""


@needs_compiler
def test_the_libraries_have_the_names_and_versions_that_torch_asks_for() -> None:
    folder = built(BUILD)

    exported = imports_of(folder / RUNTIME).exported
    assert {"cudaMalloc", "cublasSgemm_v2"} <= exported
    assert "memory_take" not in exported, "only NVIDIA's names are seen from outside"
    assert RUNTIME in imports_of(folder / "libcuda.so.1").libraries
    assert (folder / "libcuda.so").resolve() == folder / "libcuda.so.1"
    assert "libcudart.so.13" in imports_of(folder / "libcudart.so.13").exported


@needs_compiler
def test_processes_that_build_at_once_build_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_it = build_module.build

    def counted(torch: TorchBuild, folder: Path) -> None:
        compiled.append(folder)
        compile_it(torch, folder)

    monkeypatch.setattr(build_module, "build", counted)
    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(built, [BUILD, BUILD]))

    assert len(compiled) == 1
    assert len(folders) == 1
    kept = [path for path in (cache / "pytest-gpumem" / "dry").iterdir() if path.is_dir()]
    assert {*kept} == folders


@needs_compiler
def test_libraries_that_have_not_changed_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libtorch_cuda.so"
    library.write_text("of 2.15")
    read = []

    def installed() -> TorchBuild:
        read.append(library.read_text())
        return BUILD

    monkeypatch.setattr(build_module, "installed_files", lambda: [library])
    monkeypatch.setattr(build_module, "installed_build", installed)

    first, second = built_for_installed(), built_for_installed()
    assert first == second == built(BUILD)
    assert read == ["of 2.15"]

    library.write_text("of 2.15.1")
    assert built_for_installed() == first
    assert read == ["of 2.15", "of 2.15.1"]

    shutil.rmtree(first)
    assert built_for_installed() == first
    assert first.is_dir()


def test_without_a_compiler_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(DryError, match=r"install the package gcc \(apt-get install gcc"):
        built(BUILD)


@needs_compiler
def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    with pytest.raises(DryError, match=r"cannot be built: .* says fatal error: no such file"):
        built(BUILD)
