"""The build of the dry runtime with the machine's C compiler, once for each build of torch.

The result is a folder in the user's cache: the runtime itself, and for each library of NVIDIA that
torch needs an empty library of that name, with the version nodes that torch needs and a dependency
on the runtime. So the loader never looks for NVIDIA's libraries. The CUDA release and the required
libraries are read from torch's files by binutils.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from platform import machine

RUNTIME = "libpytest_gpumem_dry.so"
_SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared")

_NVIDIA_LIBRARY = re.compile(r"lib(cu[A-Za-z]+|nv\w+|nccl)\.so(\.\d+)*")
_SYMBOL = re.compile(
    r"^((?:(?:__)?cuda[A-Z_]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cupti|nvshmem"
    r"|nvrtc|nvJit|nvtx|nvml)\w*)(?:@\S+)? (\w)",
    re.MULTILINE,
)
"""Symbols of NVIDIA's libraries, without versions, and their types; in ``nm``'s POSIX format."""
_UNDEFINED = "Uwv"
"""Types of symbols that another library defines."""
_NEEDED = re.compile(
    r"^ *(?:NEEDED +(\S+)|required from (\S+):|0x\w+ 0x\w+ \d+ (\S+))$", re.MULTILINE
)
"""In ``objdump``'s output: a needed library, one whose version nodes follow, a version node."""
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the driver, which programs open at run time."""

_CUDNN, _NCCL = (9, 1, 0), (2, 21, 5)
"""Versions to use if torch's metadata does not contain them: those of torch 2.6."""


class DryError(Exception):
    """The reason why there is no dry device; the message is one sentence for the user."""


@dataclass(frozen=True)
class TorchBuild:
    """A CUDA build of torch."""

    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    nccl: tuple[int, int, int]
    libraries: Mapping[str, frozenset[str]]
    """Version nodes that torch needs of each of NVIDIA's libraries, by name."""
    symbols: frozenset[str]
    """The symbols that torch uses from NVIDIA's libraries."""

    @property
    def macros(self) -> Mapping[str, str]:
        """The C macros that ``source/abi.h`` needs."""
        major, minor, patch = self.nccl
        return {
            "CUDA_VERSION": str(self.cuda[0] * 1000 + self.cuda[1] * 10),
            "CUDNN_VERSION_PARTS": ",".join(map(str, self.cudnn)),
            # NCCL_VERSION of nccl.h, since 2.9
            "NCCL_VERSION": str(major * 10000 + minor * 100 + patch),
        }


def installed_files() -> list[Path]:
    """Return the files that the build of the installed torch is read from.

    Raises :class:`DryError` where torch is not installed.
    """
    folder = _folder()
    metadata = folder.parent.glob("torch-*.dist-info/METADATA")
    return [folder / "version.py", *sorted(metadata), *_libraries(folder)]


def installed_build() -> TorchBuild:
    """Return the build of torch that Python would import.

    Raises :class:`DryError` where it is not installed, or no CUDA build.
    """
    folder = _folder()
    if (cuda := cuda_of(folder)) is None:
        raise DryError(
            f"the dry device runs torch's own CUDA code, which torch {release_of(folder)} does not "
            "have: install a CUDA build of torch for Linux, or use --gpumem-device=sim"
        )
    major, minor = (int(part) for part in cuda.split(".")[:2])
    libraries, symbols = _imports(_libraries(folder))
    return TorchBuild(
        cuda=(major, minor),
        cudnn=_required("nvidia-cudnn-cu", _CUDNN),
        nccl=_required("nvidia-nccl-cu", _NCCL),
        libraries=libraries,
        symbols=symbols,
    )


def _folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise DryError("the dry device needs torch, which is not installed")
    return Path(spec.origin).parent


def _libraries(folder: Path) -> list[Path]:
    return sorted((folder / "lib").glob("*.so*"))


def _imports(paths: list[Path]) -> tuple[Mapping[str, frozenset[str]], frozenset[str]]:
    """Return version nodes and symbols that the libraries at ``paths`` need of NVIDIA's."""
    libraries: dict[str, set[str]] = {name: set() for name in _ALWAYS}
    library = ""
    for needed, source, node in _NEEDED.findall(run(["objdump", "-p", *map(str, paths)])):
        library = needed or source or library
        if _NVIDIA_LIBRARY.fullmatch(library):
            libraries.setdefault(library, set()).update(filter(None, [node]))
    found = _SYMBOL.findall(run(["nm", "-D", "-P", *map(str, paths)]))
    exported = {name for name, kind in found if kind not in _UNDEFINED}
    symbols = frozenset(name for name, _ in found) - exported
    return {name: frozenset(nodes) for name, nodes in libraries.items()}, symbols


def run(command: Sequence[str]) -> str:
    """Return the output of ``command``, in English; raises :class:`DryError` where it fails."""
    if shutil.which(command[0]) is None:
        raise DryError(
            "the dry device is built with a C compiler, objdump and nm, and this machine has no "
            f"{command[0]}: install the package gcc (apt-get install gcc libc6-dev binutils), or "
            "use --gpumem-device=sim"
        )
    # Without the loader's variables: a parent process may have the dry runtime preloaded.
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env={**kept, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        lines = lines or done.stderr.splitlines() or ["no message"]
        raise DryError(f"the dry runtime cannot be built: {command[0]} says {lines[0].strip()}")
    return done.stdout


def _required(package: str, otherwise: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the required release of NVIDIA's ``package``, by torch's metadata."""
    try:
        requirements = distribution("torch").requires or ()
    except PackageNotFoundError:
        return otherwise
    for requirement in requirements:
        found = re.match(rf"{package}\d+ ?\(?==(\d+)\.(\d+)\.(\d+)", requirement)
        if found:
            major, minor, patch = map(int, found.groups())
            return major, minor, patch
    return otherwise


def release_of(folder: Path) -> str:
    """Return the release of the torch in ``folder``, as ``2.15.0+cu132``."""
    return _found(r"__version__ = '([^']+)'", folder) or "unknown"


def cuda_of(folder: Path) -> str | None:
    """Return the CUDA release of the torch in ``folder``, ``None`` where it is no CUDA build."""
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        return None
    return _found(r"^cuda\b[^=]*= '([\d.]+)'", folder)


def _found(pattern: str, folder: Path) -> str | None:
    version = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(pattern, version, re.MULTILINE)
    return None if match is None else match[1]


def built_for_installed() -> Path:
    """Return the folder with the runtime for the installed torch, and build it if it is missing.

    Of several processes one builds, and the others wait. Raises :class:`DryError`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "pytest-gpumem" / "dry" / f"torch-{_key(installed_files())}"
    try:
        if folder.exists():  # in a folder that must not be entered this raises an error
            return folder
        from filelock import FileLock

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
    # Symbols that programs look up at run time are in no ELF file.
    names = (_SOURCE / "names.txt").read_text(encoding="utf-8").split()
    stubs.write_text(_stubs(torch.symbols.union(names)), encoding="utf-8")
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
    # Triton up to 3.2 links its launcher with -lcuda.
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


def missing_tool() -> str | None:
    """Return the tool that the build needs and this machine lacks; ``None`` if it has all."""
    return next((name for name in (_compiler(), "objdump", "nm") if not shutil.which(name)), None)


def _compiler() -> str:
    asked = os.environ.get("CC", "").split()[:1]
    return next((name for name in (*asked, *_COMPILERS) if shutil.which(name)), "C compiler")


def _key(files: Iterable[Path]) -> str:
    """Return a hash of names, sizes and times of ``files``, and of the build's other inputs."""
    found = [(str(path), path.stat()) for path in files]
    facts = [(name, status.st_size, status.st_mtime_ns) for name, status in found]
    content = sha256(repr((facts, machine(), _FLAGS)).encode())
    for path in (*sorted(_SOURCE.iterdir()), Path(__file__)):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]
