"""``torch.cuda.get_device_properties()`` of a simulated GPU."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from pytest_gpumem.simulated.machine.machine import GPU

KIB = 1024
MIB = 1024 * KIB

_SHARED_MEMORY_KIB = {
    (7, 0): (96, 96),
    (7, 5): (64, 64),
    (8, 0): (164, 163),
    (8, 6): (100, 99),
    (8, 9): (100, 99),
    (9, 0): (228, 227),
    (10, 0): (228, 227),
    (12, 0): (100, 99),
}
"""By compute capability, KiB per multiprocessor and, opted in, per block (CUDA C++ Programming
Guide, "Technical Specifications per Compute Capability")."""


class Uuid:
    """``torch._C._CUuuid``: the unique name of a device (torch/csrc/cuda/Module.cpp)."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    @property
    def bytes(self) -> list[int]:
        """The sixteen bytes, as numbers."""
        return list(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uuid) and other._content == self._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __str__(self) -> str:
        return str(uuid.UUID(bytes=self._content))


@dataclass(frozen=True, repr=False)
class DeviceProperties:
    """``torch.cuda.get_device_properties()`` of a simulated GPU; sizes in bytes.

    Clock rates and the width of the memory bus, which newer releases have too, are not there: a
    simulated GPU has no clock.
    """

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    uuid: Uuid
    gcnArchName: str  # noqa: N815  # torch's own name
    pci_bus_id: int
    pci_device_id: int = 0
    pci_domain_id: int = 0
    shared_memory_per_block: int = 48 * KIB
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    regs_per_multiprocessor: int = 65536

    @classmethod
    def of(cls, gpu: GPU) -> DeviceProperties:
        """Return the properties of ``gpu``."""
        model = gpu.model
        capability = model.compute_capability
        per_sm, per_block = _SHARED_MEMORY_KIB[capability]
        return cls(
            name=model.full_name,
            major=capability[0],
            minor=capability[1],
            total_memory=model.total_memory,
            multi_processor_count=model.sm_count,
            max_threads_per_multi_processor=model.max_threads_per_sm,
            L2_cache_size=model.l2_cache_bytes,
            shared_memory_per_multiprocessor=per_sm * KIB,
            shared_memory_per_block_optin=per_block * KIB,
            uuid=Uuid(uuid.uuid5(uuid.NAMESPACE_OID, f"{model.name}/{gpu.index}").bytes),
            gcnArchName=model.full_name,
            pci_bus_id=gpu.index,
        )

    def __repr__(self) -> str:
        # torch/csrc/cuda/Module.cpp, registerCudaDeviceProperties
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )
