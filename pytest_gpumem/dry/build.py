"""The build of the dry runtime with the machine's C compiler, once for each build of torch.

The result is a folder in the user's cache: the runtime itself, and for each of NVIDIA's libraries
that torch needs a library of that name, which only has the version nodes that torch needs and
depends on the runtime. The loader then never looks for NVIDIA's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from platform import machine

from pytest_gpumem.dry.torch_build import (
    DryError,
    TorchBuild,
    installed_build,
    installed_files,
    run,
)

RUNTIME = "libpytest_gpumem_dry.so"
_SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared")


def cache_folder() -> Path:
    """Return the folder of the user's cache that builds are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-gpumem" / "dry"


def built_for_installed() -> Path:
    """Return the folder with the runtime for the installed torch, and build it if it is missing.

    Processes that build at once wait for each other. Raises :class:`DryError`.
    """
    folder = cache_folder() / f"torch-{_key(installed_files())}"
    if folder.exists():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                _build_in_place(folder)
    except OSError as error:
        raise DryError(
            f"the dry runtime cannot be written to {folder.parent} ({error.strerror}): set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return folder


def _build_in_place(folder: Path) -> None:
    """Build beside ``folder`` and rename, so that a killed build leaves no partial one."""
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(installed_build(), draft)
        draft.chmod(0o755)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def build(torch: TorchBuild, folder: Path) -> None:
    """Compile the runtime for ``torch`` into ``folder``; raises :class:`DryError`."""
    compiler = _compiler()
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(torch.symbols | _names_by_string()), encoding="utf-8")
    macros = [f"-D{name}={value}" for name, value in torch.macros.items()]
    sources = [*map(str, sorted(_SOURCE.glob("*.c"))), str(stubs)]
    runtime = str(folder / RUNTIME)
    options = [f"-Wl,-soname,{RUNTIME}", f"-I{_SOURCE}", *macros]
    run([compiler, *_FLAGS, *options, "-o", runtime, *sources, "-ldl", "-lpthread"])
    for name, nodes in torch.libraries.items():
        script = folder / f"{name}.map"
        script.write_text("".join(f"{node} {{ }};\n" for node in sorted(nodes)), encoding="utf-8")
        versions = [f"-Wl,--version-script={script}"] if nodes else []
        linked = ["-Wl,--no-as-needed", runtime, "-Wl,-rpath,$ORIGIN"]
        options = [f"-Wl,-soname,{name}", *versions]
        empty = ["-x", "c", os.devnull, "-x", "none"]
        run([compiler, "-shared", "-fPIC", *options, "-o", str(folder / name), *empty, *linked])
    # For -lcuda, with which Triton up to 3.2 links its launcher.
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def _stubs(names: Iterable[str]) -> str:
    """Return C code with a function of each name that returns 0, unless the runtime has one."""
    lines = ["int trace_stub(const char *name);"]
    for name in sorted(names):
        lines.append(
            f'__attribute__((weak, visibility("default"))) int {name}(void);\n'
            f'int {name}(void) {{ return trace_stub("{name}"); }}'
        )
    return "\n".join(lines) + "\n"


def _names_by_string() -> frozenset[str]:
    """Return the names that programs look up at run time, which no ELF file contains."""
    return frozenset((_SOURCE / "names.txt").read_text(encoding="utf-8").split())


def missing_tool() -> str | None:
    """Return the tool that the build needs and this machine lacks; ``None`` if it has all."""
    return next((name for name in (_compiler(), "objdump", "nm") if not shutil.which(name)), None)


def _compiler() -> str:
    asked = os.environ.get("CC", "").split()[:1]
    return next((name for name in (*asked, *_COMPILERS) if shutil.which(name)), "C compiler")


def _key(files: Iterable[Path]) -> str:
    """Return a hash of names, sizes and times of ``files``, and of all else that decides."""
    found = [(str(path), path.stat()) for path in files]
    facts = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
    content = sha256(repr((facts, machine(), _FLAGS)).encode())
    modules = (Path(__file__).with_name(name) for name in ("build.py", "torch_build.py"))
    for path in (*sorted(_SOURCE.iterdir()), *modules):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]
