"""The runtime is compiled once, without a warning, and says in a sentence what it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_gpumem.dry import build as build_module
from pytest_gpumem.dry.build import RUNTIME, DryError, TorchBuild, built_for_installed, run

SOURCES = sorted((Path(build_module.__file__).parent / "source").glob("*.c"))

BUILD = TorchBuild(
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
    """A cache of its own for each test, and a torch of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build_module, "installed_files", list)
    monkeypatch.setattr(build_module, "installed_build", lambda: BUILD)
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
    folder = built_for_installed()

    exported = run(["nm", "-D", "-P", "--defined-only", str(folder / RUNTIME)])
    assert {"cudaMalloc", "cublasSgemm_v2"} <= {line.split()[0] for line in exported.splitlines()}
    assert "memory_take" not in exported, "only NVIDIA's names are seen from outside"
    assert RUNTIME in run(["objdump", "-p", str(folder / "libcuda.so.1")])
    assert (folder / "libcuda.so").resolve() == folder / "libcuda.so.1"
    assert "libcudart.so.13 A" in run(["nm", "-D", "-P", str(folder / "libcudart.so.13")])


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
        folders = set(threads.map(lambda _: built_for_installed(), range(2)))

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
    assert first == second
    assert read == ["of 2.15"]

    library.write_text("of 2.15.1")
    other = built_for_installed()
    assert other != first
    assert read == ["of 2.15", "of 2.15.1"]

    shutil.rmtree(other)
    assert built_for_installed() == other
    assert other.is_dir()


def test_without_a_compiler_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(DryError, match=r"no C compiler: install the package gcc \(apt-get install"):
        built_for_installed()


def test_a_cache_that_cannot_be_looked_into_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not stop root; a name that is too long raises an error like theirs.
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / ("x" * 300)))

    with pytest.raises(DryError, match=r"cannot be written to .*: set XDG_CACHE_HOME"):
        built_for_installed()


@needs_compiler
def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    with pytest.raises(DryError, match=r"cannot be built: .* says fatal error: no such file"):
        built_for_installed()
