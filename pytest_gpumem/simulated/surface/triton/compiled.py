"""The stand-in for a compiled kernel: its launch writes, and that is all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.operators.described import base_function, path_of
from pytest_gpumem.values.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine
    from pytest_gpumem.simulated.surface.triton.stores import Stores

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Largest grid, by dimension (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability", the same from 3.0 to 12.0)."""

_MADE_BY_COMPILER = frozenset({"asm", "hash", "kernel", "metadata", "name", "src"})
"""Attributes of a ``CompiledKernel`` before it is loaded (triton/compiler/compiler.py)."""


class Compiled:
    """A ``CompiledKernel`` of Triton's for a GPU that runs no code.

    Properties that only the compiler knows, like the shared memory in its ``metadata``, come from
    Triton's compiler, which needs no GPU; registers are known only where code is loaded.
    """

    function = None
    packed_metadata = None

    def __init__(
        self,
        machine: SimulatedMachine,
        stores: Stores,
        kernel: Any,
        compile_for_real: Callable[[], Any],
    ) -> None:
        self._machine = machine
        self._kernel = kernel
        self._written = stores.of(kernel)
        self._compile = compile_for_real
        self._real: Any = None

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> None:
        """Return nothing for the hooks of a launch: none of them is called."""

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        """Launch the kernel with the last of ``rest``, its arguments: function, metadata and hooks
        come first."""
        self.launch((x, y, z), rest[5:])

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *args, stream=None: self.launch(grid, args)

    def launch(self, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Update the values of the arguments for a run of the kernel.

        Raises ``ValueError`` for a tensor that is not on a GPU, ``RuntimeError`` for a grid that is
        too large, in the words of Triton's launcher.
        """
        blocks = 1
        for size, most in zip(map(operator.index, grid), _MOST_BLOCKS, strict=False):
            if size > most:
                raise RuntimeError("Triton Error [CUDA]: invalid argument")
            blocks *= size
        given = self._named(args)
        for at, value in enumerate(given.values()):
            if any(map(self._is_out_of_reach, _memory_of(value))):
                raise ValueError(
                    f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)"
                )
        if blocks > 0:
            written = [value for name, value in given.items() if name in self._written]
            self._machine.kernel_wrote(*_memory_of(written))
            values = self._machine.values
            if values.everything and values.uncomputed is None:
                values.uncomputed = f"the Triton kernel {path_of(base_function(self._kernel))}"

    def _named(self, args: Sequence[Any]) -> Mapping[str, Any]:
        parameters = self._kernel.params
        if len(args) < len(parameters):  # up to 3.2 constants are not passed on
            parameters = [each for each in parameters if not each.is_constexpr]
        return {each.name: value for each, value in zip(parameters, args, strict=False)}

    def _is_out_of_reach(self, tensor: torch.Tensor) -> bool:
        if self._machine.storages.of(tensor) is not None:
            return False
        on_host = self._machine.storages.is_on_host(tensor) or not raw.is_meta(tensor)
        return on_host and not tensor.is_pinned()

    def __getattr__(self, name: str) -> Any:
        if name in _MADE_BY_COMPILER:
            if self._real is None:
                self._real = self._compile()
            return getattr(self._real, name)
        if name.startswith("__") or name == "result":  # which a kernel has that is being compiled
            raise AttributeError(name)
        raise UnsupportedOperatorError(
            f"{user_line()} asks for {name} of the compiled kernel "
            f"{path_of(base_function(self._kernel))}, which is known where it is loaded to a real "
            f"CUDA device"
        )

    def _init_handles(self) -> None:
        """Do nothing: there is no code to load."""


def _memory_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument: itself, or those in a descriptor or reinterpretation."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _memory_of(item)
    else:
        base = None if isinstance(value, torch.Tensor) else getattr(value, "base", None)
        yield from tensors_in(value if base is None else base)
