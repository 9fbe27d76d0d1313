"""The choice of the device that a test runs on, from options and marker."""

from __future__ import annotations

import importlib.util
import re
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.device import DeviceError, ValueLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.device.dry import DryDevice
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.option_values import DeviceChoice
    from pytest_gpumem.simulated.gpu.catalogue import Machine
    from pytest_gpumem.values.world import RequestedRank, World


class DeviceSelector:
    """The choice of devices, made on first use, which imports torch."""

    def __init__(self, choice: DeviceChoice) -> None:
        self._choice = choice
        self.stand_ins = True
        """Whether simulated tests may import flash-attn where it is not installed."""
        self.compile = "auto"
        self.runs_again = True
        """Whether tests that fail by an unknown value run again with values."""
        self.world: World | None = None
        """The rank that torchrun has started this process as."""
        self._simulated: dict[tuple[str | Machine, bool, RequestedRank | None], Device] = {}
        self._dry_devices: dict[tuple[ValueLevel, RequestedRank | None], DryDevice] = {}
        self.extra: Callable[[Device], Mapping[str, str]] | None = None
        """The function returning the entries that other plugins add to a device's environment."""
        self._extended: set[Device] = set()

    @property
    def launched_rank(self) -> RequestedRank | None:
        """The rank that torchrun has started this process as, ``None`` for any other process."""
        if self.world is None:
            return None
        from pytest_gpumem.values.world import RequestedRank

        return RequestedRank(self.world.size, self.world.rank, per_machine=self.world.local_size)

    @property
    def off(self) -> bool:
        """Whether nothing is measured."""
        return self._choice.kind == "off"

    @property
    def description(self) -> str:
        """The text on the devices that tests will be measured on; it does not need torch."""
        if self._choice.kind == "dry":
            others = ", other models simulated" if self._choice.of_auto else ""
            return ", ".join(f"dry {model}" for model in self._choice.models) + others
        models = ", ".join(f"simulated {model}" for model in self._choice.models)
        if models and not self.stand_ins:
            models += " without stand-ins"
        if self._choice.kind == "auto":
            reason = f" (not dry: {self._choice.not_dry})" if self._choice.not_dry else ""
            return f"a CUDA device if torch sees one, else {models}{reason}"
        if self._choice.kind == "cuda":
            return "cuda" if self._choice.index is None else f"cuda:{self._choice.index}"
        return models or "off, nothing is measured"

    @property
    def only_model(self) -> str | None:
        """The model of the dry device, one per process; ``None`` for other devices."""
        return self._choice.models[0] if self._choice.kind == "dry" else None

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Fail a test that is not measured if it allocates inside on a dry device."""
        if self._choice.kind != "dry":
            yield
            return
        from pytest_gpumem.dry.scope import hidden_allocations

        before = hidden_allocations()
        yield
        if hidden_allocations() > before:
            pytest.fail(
                "No CUDA GPUs are available: this test has allocated on the dry device, which only "
                "measured tests may use, as its kernels compute nothing",
                pytrace=False,
            )

    def simulates(self, model: str | None) -> bool:
        """Return whether ``model`` is simulated although ``auto`` has chosen the dry device."""
        return self._choice.of_auto and model not in (None, self.only_model)

    def models(self, expectation: Expectation | None) -> Sequence[str]:
        """Return the GPU models that a test is to be simulated on, one by one.

        This does not import torch, because it is called during collection. If a GPU is found later,
        the test runs there, under the id of the first model.
        """
        if expectation is not None and expectation.gpu:
            return expectation.gpu
        if self._choice.kind == "dry":
            return self._choice.models[:1]  # the others are further GPUs of the same machine
        return self._choice.models if self._choice.kind == "sim" else ()

    def select(
        self,
        model: str | None,
        *,
        computed: ValueLevel = ValueLevel.AT_FIRST,
        requested: RequestedRank | None = None,
    ) -> Device:
        """Return the real device, or a simulated one of ``model`` (``None``: as the options say).

        There is a device for each level of ``computed`` values and each rank; the real device is
        this process's GPU, by its rank under torchrun. Raises ``DeviceError`` if the options ask
        for a CUDA device that does not exist, allocator settings in the environment are invalid, or
        a plugin's hook for the environment fails.
        """
        device = None if self.simulates(model) else self.measured_device(computed, requested)
        if device is None:
            device = self._simulate(model or self._choice.models[0], computed, requested)
        if self.extra is not None and device not in self._extended:
            device.extra = self.extra(device)
            self._extended.add(device)
        return device

    def check_torch(self) -> None:
        """Raise ``DeviceError`` where torch is not installed, or older than 2.6."""
        from pytest_gpumem.report.header import installed_release

        if importlib.util.find_spec("torch") is None:
            problem = "torch is not installed: install torch"
        elif re.match(r"1\.|2\.[0-5](\D|$)", release := installed_release("torch") or ""):
            problem = f"torch {release} is installed: install 2.6 or later"
        else:
            return
        raise DeviceError(
            f"the test's GPU memory cannot be measured because {problem}, or run with "
            "--gpumem-device=off"
        )

    def measured_device(
        self, computed: ValueLevel = ValueLevel.AT_FIRST, requested: RequestedRank | None = None
    ) -> Device | None:
        """Return the real or dry device to measure on, ``None`` where tests are simulated."""
        return self._dry(computed, requested) if self._choice.kind == "dry" else self._real

    def _dry(self, computed: ValueLevel, requested: RequestedRank | None) -> DryDevice:
        world = self.world
        key = computed, requested if world is None else None
        if key not in self._dry_devices:
            self.check_torch()
            from pytest_gpumem.device.dry import DryDevice
            from pytest_gpumem.simulated.gpu.catalogue import find_machine

            if key[1] is not None:
                self.close()  # a process is one rank at a time
            machines = list(map(find_machine, self._choice.models))
            # CUDA shows a process one instance of MIG and no other device.
            is_partitioned = any(one.model.profile for one in machines)
            self._dry_devices[key] = DryDevice(
                self._choice.models[0],
                computed,
                requested=key[1],
                gpus=1 if is_partitioned else sum(one.count for one in machines),
                index=None if world is None else world.local_rank,
                runs_again=self.runs_again,
            )
        return self._dry_devices[key]

    @cached_property
    def _real(self) -> Device | None:
        self.check_torch()
        if self._choice.kind not in ("auto", "cuda"):
            return None
        from pytest_gpumem.device.cuda import find_device

        required = self._choice.kind == "cuda"
        if self.world is not None and self._choice.index is None:
            return find_device(self.world.local_rank, required=required, of_rank=self.world.rank)
        return find_device(self._choice.index, required=required)

    def forget(self, fixture: object) -> None:
        """Drop every device's records of a fixture that has been torn down."""
        for device in (*self._simulated.values(), *self._dry_devices.values()):
            device.forget(fixture)

    def close(self) -> None:
        """Leave the process groups of dry ranks."""
        for key in [each for each in self._dry_devices if each[1] is not None]:
            self._dry_devices.pop(key).close()

    def _simulate(
        self, model: str | Machine, computed: ValueLevel, requested: RequestedRank | None
    ) -> Device:
        key = model, computed is ValueLevel.ALL, requested
        if key not in self._simulated:
            from pytest_gpumem.allocator import AllocatorError
            from pytest_gpumem.device.simulated import SimulatedDevice
            from pytest_gpumem.values.world import WorldError

            try:
                self._simulated[key] = SimulatedDevice(
                    model,
                    real_values=key[1],
                    stand_ins=self.stand_ins,
                    compile=self.compile,
                    requested=requested,
                    runs_again=self.runs_again,
                )
            except (AllocatorError, WorldError) as error:
                raise DeviceError(str(error)) from error
        return self._simulated[key]


SELECTOR = pytest.StashKey[DeviceSelector]()
"""The stash key of the selector where another plugin chooses the devices of the config."""
