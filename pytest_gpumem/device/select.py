"""Which device a test runs on: options and marker -> one active device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.device.dry import DryDevice
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.option_values import DeviceChoice
    from pytest_gpumem.simulated.distributed.world import Seat, World


class DeviceSelector:
    """Decides on first use, and once: torch is imported here and not before."""

    def __init__(self, choice: DeviceChoice) -> None:
        self._choice = choice
        self.stand_ins: Sequence[str] | None = None
        """Libraries that simulated tests may import although they are not installed; ``None``:
        those that are there without being named."""
        self.compile = "auto"
        self.world: World | None = None
        """The rank that torchrun has started this process as."""
        self._simulated: dict[tuple[str, bool, Seat | None], Device] = {}
        self._dry_ranks: dict[Seat, DryDevice] = {}
        self._real: Device | None = None
        self._decided = False
        self.extra: Callable[[Device], Mapping[str, str]] | None = None
        """What other plugins add to the environment of a device."""
        self._extended: set[Device] = set()

    @property
    def seat(self) -> Seat | None:
        """The rank that torchrun has started this process as, ``None`` where it is no such."""
        if self.world is None:
            return None
        from pytest_gpumem.simulated.distributed.world import Seat

        return Seat(self.world.size, self.world.rank, per_machine=self.world.local_size)

    @property
    def off(self) -> bool:
        """Whether nothing is measured."""
        return self._choice.kind == "off"

    @property
    def description(self) -> str:
        """What is known without torch of where tests will be measured."""
        if self._choice.kind == "dry":
            return ", ".join(f"dry {model}" for model in self._choice.models)
        models = ", ".join(f"simulated {model}" for model in self._choice.models)
        if models and self.stand_ins is not None:
            models += f" with stand-ins of {', '.join(self.stand_ins) or 'no library'}"
        if self._choice.kind == "auto":
            return f"a CUDA device if torch sees one, else {models}"
        if self._choice.kind == "cuda":
            return "cuda" if self._choice.index is None else f"cuda:{self._choice.index}"
        return models or "off, nothing is measured"

    @property
    def only_model(self) -> str | None:
        """The model of the dry device, which a process has one of; ``None`` for other devices."""
        return self._choice.models[0] if self._choice.kind == "dry" else None

    def models(self, expectation: Expectation | None) -> Sequence[str]:
        """Return the GPU models that a test is to be simulated on, one by one.

        Known without torch, so that collecting does not import it; where a GPU is found later, the
        first of them stands for it.
        """
        if expectation is not None and expectation.gpu:
            return expectation.gpu
        if self._choice.kind == "dry":
            return self._choice.models[:1]  # the others are beside it in one machine
        return self._choice.models if self._choice.kind == "sim" else ()

    def select(
        self, model: str | None, *, real_values: bool = False, seat: Seat | None = None
    ) -> Device:
        """Return the real device, or a simulated one of ``model`` (``None``: as the options say).

        One with ``real_values`` is another device: it computes on the CPU what it simulates. So is
        that of a rank; the real one is the rank's own, as torchrun has started it.
        Raises ``DeviceError`` where the options ask for a CUDA device that is not there, the
        environment has allocator settings that no device takes, or a plugin that adds to it fails.
        """
        real = self.real()
        if real is not None and self.only_model is not None and self.world is None:
            real = self._dry(seat)
        device = real or self._simulate(model or self._choice.models[0], real_values, seat)
        if self.extra is not None and device not in self._extended:
            device.extra = self.extra(device)
            self._extended.add(device)
        return device

    def check_torch(self) -> None:
        """Raise ``DeviceError`` where torch is not installed."""
        from importlib.util import find_spec

        from pytest_gpumem.device.errors import DeviceError

        if find_spec("torch") is None:
            raise DeviceError(
                "the test's GPU memory cannot be measured because torch is not installed: install "
                "torch, or run with --gpumem-device=off"
            )

    def real(self) -> Device | None:
        """Return the real device to measure on, ``None`` where tests are simulated."""
        if not self._decided:
            self.check_torch()
            self._real = self._find_real()
            self._decided = True
        return self._real

    def forget(self, fixture: object) -> None:
        """Drop what any device knows of a fixture that has been torn down."""
        for device in self._simulated.values():
            device.forget(fixture)

    def _find_real(self) -> Device | None:
        if self._choice.kind == "dry":
            from pytest_gpumem.device.dry import DryDevice

            own = None if self.world is None else self.world.local_rank
            return DryDevice(self._choice.models[0], index=own)
        if self._choice.kind not in ("auto", "cuda"):
            return None
        from pytest_gpumem.device.cuda import find_device

        required = self._choice.kind == "cuda"
        if self.world is not None and self._choice.index is None:
            return find_device(self.world.local_rank, required=required, of_rank=self.world.rank)
        return find_device(self._choice.index, required=required)

    def _dry(self, seat: Seat | None) -> Device | None:
        """Return the dry device, or that of a rank, which leaves the groups of other ranks."""
        if seat is None:
            return self._real
        if seat not in self._dry_ranks:
            from pytest_gpumem.device.dry import DryDevice

            self.close()
            self._dry_ranks[seat] = DryDevice(self._choice.models[0], seat, gpus=self._dry_gpus)
        return self._dry_ranks[seat]

    @property
    def _dry_gpus(self) -> int:
        from pytest_gpumem.simulated.gpu.catalogue import find_machine

        return sum(find_machine(name).count for name in self._choice.models)

    def close(self) -> None:
        """Leave the process groups of dry ranks."""
        while self._dry_ranks:
            self._dry_ranks.popitem()[1].close()

    def _simulate(self, model: str, real_values: bool, seat: Seat | None) -> Device:
        key = model, real_values, seat
        if key not in self._simulated:
            from pytest_gpumem.device.errors import DeviceError
            from pytest_gpumem.device.simulated import SimulatedDevice
            from pytest_gpumem.simulated.allocator import AllocatorError
            from pytest_gpumem.simulated.distributed.world import WorldError

            try:
                self._simulated[key] = SimulatedDevice(
                    model,
                    real_values=real_values,
                    stand_ins=self.stand_ins,
                    compile=self.compile,
                    seat=seat,
                )
            except (AllocatorError, WorldError) as error:
                raise DeviceError(str(error)) from error
        return self._simulated[key]


SELECTOR = pytest.StashKey[DeviceSelector]()
"""Of a config whose devices another plugin chooses."""
