"""The catalogue of GPU models that can be simulated, and of MIG's parts; imports no torch.

Instances of MIG are the parts into which it divides a GPU. Sources: "NVIDIA Multi-Instance GPU User
Guide", "Supported MIG Profiles" (parts of the L2 cache, which are those of the memory slices, and
how many slices there are) and "Getting Started with MIG" (memory and multiprocessors as
``nvidia-smi`` lists them). CUDA reports the same memory: the manual page of
``condor_gpu_discovery`` has 20,096 and 4,864 MiB. Profiles whose memory is in neither are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.sizes import KIB, MIB
from pytest_gpumem.values.serialization import Plain


class GpuError(ValueError):
    """A model that the catalogue does not have; the message is one sentence for the user."""


@dataclass(frozen=True)
class GpuModel(Plain):
    """Properties of one GPU model that a program can read; sizes in bytes."""

    name: str
    """The name in this catalogue, ``A100-40GB``, or ``A100-40GB/1g.5gb`` for an instance of MIG."""
    full_name: str
    """The name by the driver and ``torch.cuda.get_device_name``, ``NVIDIA A100-SXM4-40GB``."""
    total_memory: int
    """The ``total_memory`` of ``torch.cuda.get_device_properties(0)``."""
    compute_capability: tuple[int, int]
    sm_count: int
    """Streaming multiprocessors, ``multi_processor_count``."""
    max_threads_per_sm: int
    l2_cache_bytes: int
    memory_bus_bits: int = 0
    """The width of the memory bus, ``memory_bus_width``; 0 where it is not known."""
    memory_gb_per_second: int = 0
    """The bandwidth of the memory, by which Inductor fuses kernels; 0 where it is not known."""

    @property
    def parent_name(self) -> str:
        """The name of the GPU that an instance of MIG is a part of, or its own."""
        return self.name.partition("/")[0]

    @property
    def profile(self) -> str:
        """The profile of an instance of MIG, ``1g.5gb``; empty for a whole GPU."""
        return self.name.partition("/")[2]


# One row is all that a model needs. Its values are those of a real card on Linux; above it stands
# where they were read. The driver keeps a part of the memory to itself, which differs by release
# (of one model by up to 1.5 %), so the source names the driver's CUDA version: deviceQuery 12.2.
#
# max_threads_per_sm: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability": 1024 for 7.5; 1536 for 8.6 and 8.9; 2048 for 7.0, 8.0, 9.0 and 10.
# memory_bus_bits, memory_gb_per_second: NVIDIA's data sheets.
_ROWS: tuple[tuple[Any, ...], ...] = (
    # deviceQuery 12.2 (Google Colab)
    ("T4", "Tesla T4", 15_835_660_288, (7, 5), 40, 1024, 4 * MIB, 256, 320),
    # deviceQuery 12.4
    ("V100", "Tesla V100-SXM2-16GB", 16_928_342_016, (7, 0), 80, 2048, 6 * MIB, 4096, 900),
    # deviceQuery 12.9
    ("V100-32GB", "Tesla V100-SXM2-32GB", 34_072_559_616, (7, 0), 80, 2048, 6 * MIB, 4096, 900),
    # deviceQuery 12.8
    ("A10", "NVIDIA A10", 23_696_375_808, (8, 6), 72, 1536, 6 * MIB, 384, 600),
    # torch 2.15 get_device_properties, CUDA 13 build: 22587 MB, exact to 1 MiB only
    ("A10G", "NVIDIA A10G", 22_587 * MIB, (8, 6), 80, 1536, 6 * MIB, 384, 600),
    # deviceQuery 12.2 (github.com/bottlerocket-os/bottlerocket/pull/3873)
    ("A100-40GB", "NVIDIA A100-SXM4-40GB", 42_298_834_944, (8, 0), 108, 2048, 40 * MIB, 5120, 1555),
    # deviceQuery 12.2
    ("A100-80GB", "NVIDIA A100-SXM4-80GB", 84_987_740_160, (8, 0), 108, 2048, 40 * MIB, 5120, 2039),
    # deviceQuery 12.0
    ("L4", "NVIDIA L4", 23_612_293_120, (8, 9), 58, 1536, 48 * MIB, 192, 300),
    # cuda-device-query, CUDA 12.4 driver
    ("L40S", "NVIDIA L40S", 47_576_711_168, (8, 9), 142, 1536, 96 * MIB, 384, 864),
    # deviceQuery 12.2 (12 GB model); L2 from a CUDA 12.1 driver
    ("RTX-3060", "NVIDIA GeForce RTX 3060", 12_629_508_096, (8, 6), 28, 1536, 2304 * KIB, 192, 360),
    # deviceQuery 11.8
    ("RTX-3090", "NVIDIA GeForce RTX 3090", 25_447_170_048, (8, 6), 82, 1536, 6 * MIB, 384, 936),
    # deviceQuery 12.3, of the laptop model, which has the same memory and SMs: none of the desktop
    # card under Linux is public; L2 from NVIDIA's data sheet
    ("RTX-4060", "NVIDIA GeForce RTX 4060", 8_325_824_512, (8, 9), 24, 1536, 24 * MIB, 128, 272),
    # deviceQuery 12.4
    ("RTX-4090", "NVIDIA GeForce RTX 4090", 25_386_352_640, (8, 9), 128, 1536, 72 * MIB, 384, 1008),
    # deviceQuery 12.8
    ("H100", "NVIDIA H100 80GB HBM3", 85_028_896_768, (9, 0), 132, 2048, 50 * MIB, 5120, 3350),
    # torch total_memory and l2_bytes of a vLLM run
    ("H200", "NVIDIA H200", 150_109_880_320, (9, 0), 132, 2048, 60 * MIB, 6144, 4800),
    # torch total_memory, CUDA 12.8 and 13.0 builds; SMs and L2: github.com/pytorch/ao/pull/4002
    ("B200", "NVIDIA B200", 191_503_007_744, (10, 0), 148, 2048, 129_536 * KIB, 8192, 8000),
)

GPUS: Mapping[str, GpuModel] = MappingProxyType({row[0]: GpuModel(*row) for row in _ROWS})
"""Every model by name. ``total_memory`` is exact to the byte, unless its row says otherwise."""


class Limits(NamedTuple):
    """Properties of a multiprocessor by compute capability; sizes in bytes."""

    shared_memory: int
    shared_memory_per_block: int
    """The most of it that a kernel may opt in to."""
    blocks: int
    """The most blocks that it holds at a time."""


LIMITS = {
    (7, 0): Limits(96 * KIB, 96 * KIB, 32),
    (7, 5): Limits(64 * KIB, 64 * KIB, 16),
    (8, 0): Limits(164 * KIB, 163 * KIB, 32),
    (8, 6): Limits(100 * KIB, 99 * KIB, 16),
    (8, 7): Limits(164 * KIB, 163 * KIB, 16),
    (8, 9): Limits(100 * KIB, 99 * KIB, 24),
    (9, 0): Limits(228 * KIB, 227 * KIB, 32),
    (10, 0): Limits(228 * KIB, 227 * KIB, 32),
    (12, 0): Limits(100 * KIB, 99 * KIB, 24),
}
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; a capability that
is not here has the limits of the nearest earlier one."""


def limits_of(capability: tuple[int, int]) -> Limits:
    """Return the limits of ``capability``, or those of the nearest earlier one that is known."""
    return LIMITS[max((each for each in LIMITS if each <= capability), default=min(LIMITS))]


MOST_GPUS = 120
"""Devices that torch can use: C10_COMPILE_TIME_MAX_GPUS in c10/cuda/CUDAMacros.h."""


@dataclass(frozen=True)
class Machine(Plain):
    """One or several equal GPUs in a machine, written ``"A100-80GB*2"`` or ``"A100-80GB"``."""

    model: GpuModel
    count: int

    @property
    def name(self) -> str:
        """The name as users write it, with the catalogue's spelling."""
        return self.model.name if self.count == 1 else f"{self.model.name}*{self.count}"

    @property
    def per_machine(self) -> int | None:
        """The number of GPUs in each of several machines; ``None`` if the user wrote none."""
        return self.count if self.count > 1 else None


def find_machine(name: str | GpuModel | Machine) -> Machine:
    """Return the machine that ``"A100-80GB*2"`` or ``"T4"`` names; of a model, a machine with one.

    Raises :class:`GpuError` for an unknown model or an impossible number.
    """
    if isinstance(name, Machine):
        return name
    if isinstance(name, GpuModel):
        return Machine(name, 1)
    if not isinstance(name, str):
        raise GpuError(f'{quoted(name)} is not a GPU model; write a name like "A100-40GB"')
    model, star, number = name.partition("*")
    number = number.strip()
    if not star:
        return Machine(find_gpu(name), 1)
    if "/" in model:
        raise GpuError(
            f"{quoted(name)} is several instances of MIG, of which CUDA shows a process only one; "
            f"write {printable(model.strip(), 40)}"
        )
    if number.isascii() and number.isdecimal() and 1 <= int(number) <= MOST_GPUS:
        return Machine(find_gpu(model), int(number))
    raise GpuError(
        f"{quoted(name)} does not say how many GPUs; write a number from 1 to {MOST_GPUS} after "
        f'the star, as in "{printable(model.strip(), 40) or "A100-80GB"}*2"'
    )


def find_gpu(name: str) -> GpuModel:
    """Return the model called ``name``, or an instance of MIG of one, without regard to case.

    Raises :class:`GpuError` with the closest names and the whole list.
    """
    whole, slash, profile = name.strip().casefold().partition("/")
    by_folded_name = {known.casefold(): gpu for known, gpu in GPUS.items()}
    if (gpu := by_folded_name.get(whole)) is not None:
        return _instance(gpu, profile, name) if slash else gpu
    raise GpuError(
        f"{quoted(name)} is not a GPU model; {_suggestion(name)}known: {', '.join(GPUS)}"
    )


def _instance(gpu: GpuModel, profile: str, name: str) -> GpuModel:
    known = INSTANCES.get(gpu.name, {})
    if (found := known.get(profile)) is None:
        divided = [f"{model}/{one}" for model, profiles in INSTANCES.items() for one in profiles]
        raise GpuError(
            f"{quoted(name)} is not an instance of MIG that can be simulated; "
            f"known: {', '.join(divided)}"
        )
    return replace(
        gpu,
        name=f"{gpu.name}/{profile}",
        full_name=f"{gpu.full_name} MIG {profile}",
        total_memory=found.memory,
        sm_count=found.sms,
        l2_cache_bytes=gpu.l2_cache_bytes * found.memory_slices // MEMORY_SLICES,
    )


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    written = name.strip().casefold()
    # "A100" means one of the two A100, though "A10" is the closer spelling.
    close = [known for known in GPUS if written and written in known.casefold()]
    close += [known for known in GPUS if written.startswith(f"{known.casefold()}-")]
    if not close:
        by_folded_name = {known.casefold(): known for known in GPUS}
        close = [by_folded_name[match] for match in get_close_matches(written, by_folded_name, n=2)]
    return f"did you mean {' or '.join(close)}? " if close else ""


COMPUTE_SLICES, MEMORY_SLICES = 7, 8
"""The slices of a GPU that its instances share."""


class Instance(NamedTuple):
    """A profile of MIG."""

    memory: int
    """Bytes."""
    sms: int
    """Streaming multiprocessors."""
    compute_slices: int
    memory_slices: int
    """Eighths of the memory, and of the L2 cache."""


INSTANCES: Mapping[str, Mapping[str, Instance]] = {
    "A100-40GB": {
        "1g.5gb": Instance(4_864 * MIB, 14, 1, 1),
        "2g.10gb": Instance(9_984 * MIB, 28, 2, 2),
        "3g.20gb": Instance(20_096 * MIB, 42, 3, 4),
        "4g.20gb": Instance(20_096 * MIB, 56, 4, 4),
    },
    "H100": {"3g.40gb": Instance(40_448 * MIB, 60, 3, 4)},
}
"""Profiles by the model of the GPU and by name."""


def fit(instances: Sequence[Instance]) -> bool:
    """Return whether one GPU has room for ``instances``."""
    return (
        sum(one.compute_slices for one in instances) <= COMPUTE_SLICES
        and sum(one.memory_slices for one in instances) <= MEMORY_SLICES
    )
