"""``torch.Generator`` of a simulated GPU, and memory for its seed and offset in graphs.

A generator of the CPU draws the numbers. Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.gpu.memory import Memory

_by_address: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The CUDA generators, by the address of their C++ object."""


def generator_type(
    real: type[torch.Generator], captured: Callable[[], Any]
) -> Callable[..., torch.Generator]:
    """Return ``torch.Generator``, whose CUDA generators have states as long as a GPU's.

    Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp (get_state, set_state): 16 bytes, seed and
    offset, a multiple of 4; a state from elsewhere may have only the seed. ``captured`` returns the
    capture that work goes to: the offset is then the capture's, and the seed may not change.
    """
    states: list[torch.Tensor] = []
    offsets: dict[bytes, int] = {}
    """The offset that stands for each of ``states``, by the bytes of the state."""

    def refuse(call: str) -> None:
        if captured() is not None:
            raise refused_in_capture(call)

    class Kind(type(real)):  # type: ignore[misc]  # stays a class for isinstance()
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, real)

    class Generator(real, metaclass=Kind):  # type: ignore[misc,valid-type]  # as above
        _cuda_device: torch.device
        _source: torch.Generator
        was_seeded = True
        """Whether it was seeded since the dropout state was allocated (``reset_rnn_state``)."""

        def __new__(cls, device: Any = None) -> Any:
            target = torch.device("cuda", device) if isinstance(device, int) else device
            target = torch.device("cpu" if target is None else target)
            if target.type != "cuda":
                return real(target)
            refuse("construct a new CUDAGeneratorImpl")
            return cls._sharing(torch.device("cuda", target.index or 0), real())

        @classmethod
        def _sharing(cls, device: torch.device, source: torch.Generator) -> Any:
            made = super().__new__(cls)
            made._cuda_device = device
            made._source = source
            _by_address[made._cdata] = made
            return made

        def __reduce__(self) -> Any:
            return restored, (self.device, self.get_state())

        @property
        def device(self) -> torch.device:
            return self._cuda_device

        def _use_offset(self) -> None:
            capture = captured()
            if capture is not None and capture.graph is not None:
                capture.graph.use_random_state(capture.gpu, self)

        def _check_seed(self, seed: int) -> None:
            if seed != self._source.initial_seed() and captured() is not None:
                raise RuntimeError(
                    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only "
                    "if new seed is the same as the original seed."
                )

        def get_state(self) -> torch.Tensor:
            self._use_offset()
            return self._get_state()

        def _get_state(self) -> torch.Tensor:
            state = self._source.get_state()
            offset = offsets.setdefault(bytes(state.numpy()), 4 * len(states))
            if offset == 4 * len(states):
                states.append(state)
            return _bytes_of(self._source.initial_seed(), offset)

        def set_state(self, state: torch.Tensor) -> Any:
            self._check_seed(_numbers_of(state)[0])
            self._use_offset()
            self.was_seeded = True
            return self._set_state(state)

        def _set_state(self, state: torch.Tensor) -> Any:
            seed, offset = _numbers_of(state)
            if not offset % 4 and offset // 4 < len(states):
                known = states[offset // 4]
                if real().set_state(known).initial_seed() == seed:
                    self._source.set_state(known)
                    return self
            self._source.manual_seed(seed)  # a state of another process
            return self

        def manual_seed(self, seed: int) -> Any:
            self._check_seed(seed)
            self.was_seeded = True
            self._source.manual_seed(seed)
            return self

        def seed(self) -> int:
            refuse("call CUDAGeneratorImpl::seed")
            self.was_seeded = True
            return self._source.seed()

        def initial_seed(self) -> int:
            return self._source.initial_seed()

        def get_offset(self) -> int:
            refuse("call CUDAGeneratorImpl::get_offset")
            return _numbers_of(self._get_state())[1]

        def set_offset(self, offset: int) -> Any:
            refuse("call CUDAGeneratorImpl::set_offset")
            if offset % 4:
                raise RuntimeError("offset must be a multiple of 4")
            return self._set_state(_bytes_of(self.initial_seed(), offset))

        def clone_state(self) -> Any:
            refuse("call CUDAGeneratorImpl::clone_impl")
            source = real()
            source.set_state(self._source.get_state())
            return self._sharing(self._cuda_device, source)

        def graphsafe_get_state(self) -> Any:
            return self._sharing(self._cuda_device, self._source)

        def graphsafe_set_state(self, state: Any) -> Any:
            if getattr(state, "_cuda_device", None) is None:
                raise RuntimeError("Expected a CUDA Generator")
            self._source = state._source
            return self

    # Where pickle looks for it.
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    return Generator


def refused_in_capture(call: str) -> RuntimeError:
    """Return the error of ``assertNotCapturing`` (aten/src/ATen/cuda/CUDAGraphsUtils.cuh)."""
    return RuntimeError(
        f"Cannot {call} during CUDA graph capture. If you need this call to be captured, please "
        "file an issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
    )


def restored(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Return the generator that was pickled."""
    return torch.Generator(device).set_state(state)


def shared_state(generator: torch.Generator) -> torch.Generator:
    """Return a second generator with the present state of ``generator``, if that is a GPU's."""
    made = _by_address.get(generator._cdata)  # type: ignore[attr-defined]  # missing in the stub
    return generator if made is None else made.graphsafe_get_state()


def drawn_from(generator: torch.Generator) -> torch.Generator:
    """Return the CPU generator that draws for ``generator``: generators with one state share it."""
    # Operators are handed another object for the same generator of C++.
    made = _by_address.get(generator._cdata)  # type: ignore[attr-defined]  # missing in the stub
    return generator if made is None else made._source


def _numbers_of(state: torch.Tensor) -> tuple[int, int]:
    if state.numel() not in (8, 16):
        raise RuntimeError("RNG state is wrong size")
    content = bytes(state.cpu().numpy())
    return int.from_bytes(content[:8], "little"), int.from_bytes(content[8:], "little")


def _bytes_of(seed: int, offset: int) -> torch.Tensor:
    content = seed.to_bytes(8, "little") + offset.to_bytes(8, "little")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


RNG_BYTES = 8
"""A seed, and an offset: one int64 each."""


class RandomState:
    """The two small tensors with the seed and offset of a graph's random operators.

    ======== ==================================== ========================= ==============
    torch    allocated                            on the stream             freed
    ======== ==================================== ========================= ==============
    2.6-2.11 for the first graph of a generator,  of the capture            with the last
             by capture_begin or                                            of its graphs
             register_generator_state
    2.12-13  for each capture and registered      the default one           by reset of
             generator, by capture_begin                                    the graph
    2.14-15  for each capture and generator, by   the default one           by reset of
             the first random operator, or when                             the graph
             its state is read or set
    ======== ==================================== ========================= ==============

    Sources: ``CUDAGeneratorState::register_graph`` of 2.6 (CUDAGeneratorImpl.cpp);
    ``init_capture_state``, which ``CUDAGraph::capture_begin`` calls for every registered generator
    once the capture is under way, in the headers of the wheels of 2.12.1 and 2.13.0 (PyTorch
    #176752), whose test_graph_memory_stats_and_use_result_after_destroy_graph finds three blocks
    of a graph without random operators; ``get_capture_state(id, create_if_not_found)`` in those of
    2.14.1 and 2.15.0, where registering is left to the operator (#176753).

    This class implements the first row of the table; later, each capture holds its own memory.
    """

    def __init__(self) -> None:
        self._shared: dict[object, tuple[set[int], Memory, list[int]]] = {}

    def register(self, graph: object, state: object, gpu: GpuState) -> None:
        """Run ``register_graph`` of a generator's state, up to 2.11."""
        known = self._shared.get(state)
        # A test before this one may have left a graph, in a memory that is no longer the GPU's.
        if known is None or known[1] is not gpu.allocator:
            self._shared[state] = (set(), gpu.allocator, state_tensors(gpu, gpu.stream))
        self._shared[state][0].add(id(graph))

    def unregister(self, graph: object) -> None:
        """Run ``unregister_graph``: the graph has died."""
        for state, (graphs, memory, addresses) in list(self._shared.items()):
            graphs.discard(id(graph))
            if not graphs:
                free_all(memory, addresses)
                del self._shared[state]


def state_of(generator: torch.Generator | None, gpu: GpuState) -> object:
    """Return the state of ``generator``, or of the GPU's default one: generators can share one."""
    return drawn_from(torch.cuda.default_generators[gpu.index] if generator is None else generator)


def state_tensors(gpu: GpuState, stream: int) -> list[int]:
    """Allocate seed and offset; return their addresses."""
    return [gpu.allocator.malloc(RNG_BYTES, stream) for _ in range(2)]


def free_all(memory: Memory, addresses: list[int]) -> None:
    """Free ``addresses``, the last first, and empty the list."""
    while addresses:
        memory.free(addresses.pop())
