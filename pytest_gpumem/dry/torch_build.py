"""The CUDA release and libraries of the installed torch, read only from its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from pytest_gpumem.dry.elf import ElfError, Imports, imports_of
from pytest_gpumem.dry.version import cuda_of, release_of

_NVIDIA_LIBRARY = re.compile(r"lib(cu[A-Za-z]+|nv\w+|nccl)\.so(\.\d+)*")
_NVIDIA_NAME = re.compile(
    r"(__)?cuda[A-Z_]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cupti|nvshmem|nvrtc"
    r"|nvJit|nvtx|nvml"
)
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the driver, which programs open while they run."""

_CUDNN, _NCCL = (9, 1, 0), (2, 21, 5)
"""Versions where torch's metadata does not contain them: those of torch 2.6."""


class DryError(Exception):
    """The reason why there is no dry device; the message is one sentence for the user."""


@dataclass(frozen=True)
class TorchBuild:
    """A CUDA build of torch."""

    release: str
    """``2.15.0+cu132``."""
    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    nccl: tuple[int, int, int]
    libraries: Mapping[str, frozenset[str]]
    """Version nodes that torch needs of each of NVIDIA's libraries, by name."""
    symbols: frozenset[str]
    """The names that torch takes from NVIDIA's libraries."""

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
    """Return the build of the torch that Python would import.

    Raises :class:`DryError` where it is not installed, or no CUDA build.
    """
    folder = _folder()
    release, cuda = release_of(folder), cuda_of(folder)
    if cuda is None:
        raise DryError(
            f"the dry device runs torch's own CUDA code, which torch {release} does not have: "
            "install a CUDA build of torch for Linux, or use --gpumem-device=sim"
        )
    major, minor = (int(part) for part in cuda.split(".")[:2])
    libraries, symbols = _imports(_libraries(folder))
    return TorchBuild(
        release=release,
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
    """Return the names that the libraries at ``paths`` together take from NVIDIA's."""
    libraries: dict[str, frozenset[str]] = {name: frozenset() for name in _ALWAYS}
    symbols: set[str] = set()
    exported: set[str] = set()
    for path in paths:
        try:
            imports: Imports = imports_of(path)
        except ElfError:
            continue
        exported |= imports.exported
        symbols |= {name for name in imports.symbols if _NVIDIA_NAME.match(name)}
        for name in filter(_NVIDIA_LIBRARY.fullmatch, imports.libraries):
            nodes = imports.versions.get(name, frozenset())
            libraries[name] = libraries.get(name, frozenset()) | nodes
    return libraries, frozenset(symbols - exported)


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
