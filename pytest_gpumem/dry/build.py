"""The build of the dry runtime with the machine's C compiler, once for each build of torch.

The result is a folder in the user's cache: the runtime itself, and for each of NVIDIA's libraries
that torch needs a library of that name, which only has the version nodes that torch needs and
depends on the runtime. The loader then never looks for NVIDIA's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from platform import machine

from pytest_gpumem.dry.torch_build import DryError, TorchBuild, installed_build, installed_files

RUNTIME = "libpytest_gpumem_dry.so"
_SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared")


def cache_folder() -> Path:
    """Return the folder of the user's cache that builds are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-gpumem" / "dry"


def built_for_installed() -> Path:
    """Return the folder with the runtime for the installed torch; raises :class:`DryError`.

    Reading the symbols of torch's libraries takes half a second. So a file beside the builds says
    which of them belongs to libraries of these sizes and times.
    """
    files = installed_files()
    note = cache_folder() / f"installed-{_key_of_files(files)}"
    try:
        folder = note.with_name(note.read_text(encoding="utf-8"))
        if folder.is_dir():
            return folder
    except OSError:
        pass
    folder = built(installed_build())
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        draft.write_text(folder.name, encoding="utf-8")
        draft.replace(note)
    except OSError:
        draft.unlink(missing_ok=True)
    return folder


def built(torch: TorchBuild) -> Path:
    """Return the folder with the runtime for ``torch``, which is compiled where it is missing.

    Processes that build at once wait for each other. Raises :class:`DryError` where there is no
    compiler, or it fails.
    """
    folder = cache_folder() / f"torch{torch.release}-{_key(torch)}"
    if folder.exists():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                _build_in_place(torch, folder)
    except OSError as error:
        raise DryError(
            f"the dry runtime cannot be written to {folder.parent} ({error.strerror}): set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return folder


def _build_in_place(torch: TorchBuild, folder: Path) -> None:
    """Build beside ``folder`` and rename, so that a killed build leaves no partial one."""
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(torch, draft)
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
    _run([compiler, *_FLAGS, *options, "-o", runtime, *sources, "-ldl", "-lpthread"])
    for name, nodes in torch.libraries.items():
        script = folder / f"{name}.map"
        script.write_text("".join(f"{node} {{ }};\n" for node in sorted(nodes)), encoding="utf-8")
        versions = [f"-Wl,--version-script={script}"] if nodes else []
        linked = ["-Wl,--no-as-needed", runtime, "-Wl,-rpath,$ORIGIN"]
        options = [f"-Wl,-soname,{name}", *versions]
        empty = ["-x", "c", os.devnull, "-x", "none"]
        _run([compiler, "-shared", "-fPIC", *options, "-o", str(folder / name), *empty, *linked])
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


def has_compiler() -> bool:
    """Return whether this machine has a C compiler."""
    return _known_compiler() is not None


def _known_compiler() -> str | None:
    asked = os.environ.get("CC", "").split()[:1]
    return next((name for name in (*asked, *_COMPILERS) if shutil.which(name)), None)


def _compiler() -> str:
    if (name := _known_compiler()) is not None:
        return name
    raise DryError(
        "the dry device is built with a C compiler, and this machine has neither cc, gcc nor "
        "clang: install the package gcc (apt-get install gcc libc6-dev), or use --gpumem-device=sim"
    )


def _run(command: Sequence[str]) -> None:
    # Without the loader's variables: a parent process may have the dry runtime preloaded.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise DryError(f"the dry runtime cannot be built: {command[0]} says {lines[0].strip()}")


def _key(torch: TorchBuild) -> str:
    """Return a hash of all that the result depends on."""
    asked = sorted((name, sorted(nodes)) for name, nodes in torch.libraries.items())
    return _key_with_sources(torch.macros, machine(), _FLAGS, sorted(torch.symbols), asked)


def _key_of_files(files: Iterable[Path]) -> str:
    """Return a hash of names, sizes and times of ``files``, and of the runtime's sources."""
    found = [(str(path), path.stat()) for path in files]
    return _key_with_sources(
        machine(), [(name, status.st_size, status.st_mtime_ns) for name, status in found]
    )


def _key_with_sources(*facts: object) -> str:
    content = sha256(repr(facts).encode())
    for path in sorted(_SOURCE.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    for module in ("build.py", "torch_build.py", "elf.py"):
        content.update(Path(__file__).with_name(module).read_bytes())
    return content.hexdigest()[:16]
