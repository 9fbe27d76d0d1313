"""``--device``: the device on which a command runs code, and processes with the dry device."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.cli.command import BAD_INPUT, Argument, argument
from pytest_gpumem.dry.load import environment_of_option
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.gpu.catalogue import find_machine

CUDA, DRY, SIM = "cuda", "dry", "sim"
_PREFIX = "gpumem: "


@dataclass(frozen=True)
class DeviceOption:
    """A kind of device and, where it was named with it, a model of the catalogue."""

    kind: str
    model: str | None = None

    def models(self, given: Sequence[str] | None, otherwise: Sequence[str]) -> list[str]:
        """Return the models to run on: that of the option, or ``given`` by ``--gpu``.

        Raises ``ValueError`` where both name some, or a model is unknown.
        """
        if self.model is not None and given:
            raise ValueError(
                f"--device {self.kind}:{self.model} names a model, and so does --gpu: leave one out"
            )
        named = [self.model] if self.model is not None else list(given or otherwise)
        for name in named:
            if name != CUDA:
                find_machine(name)
        return named


def _device(text: str) -> DeviceOption:
    kind, colon, model = text.partition(":")
    if kind not in (CUDA, DRY, SIM) or (colon and (not model or kind == CUDA)):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a device; write cuda, dry, dry:H100, sim or sim:H100"
        )
    return DeviceOption(kind, model or None)


def device_argument() -> Argument:
    """Return the option, which all commands that run code have."""
    return argument(
        "--device KIND[:MODEL]",
        "sim, dry (torch's own CUDA code without a GPU) or cuda, the device of this machine "
        "(default: sim)",
        type=_device,
        default=DeviceOption(SIM),
    )


def run_on_dry(given: Sequence[str], gpu: str) -> int:
    """Run the command line ``given`` in a process with a dry ``gpu``; return its exit code.

    Raises ``ValueError`` where there is no such device.
    """
    environment = {**os.environ, **environment_of_option(gpu)}
    return subprocess.run(_command(given), env=environment, check=False).returncode


def answer_on_dry(given: Sequence[str], gpu: str, *, memory: int | None = None) -> Any:
    """Return the JSON output of the command line ``given`` in a process with a dry ``gpu``.

    Its memory is as many bytes, or the model's. Raises ``ValueError`` for what the command refuses.
    """
    done = subprocess.run(
        [*_command(given), "--json"],
        env={**os.environ, **environment_of_option(gpu, memory)},
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    refusals = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
    if done.returncode == BAD_INPUT and refusals:
        raise ValueError(refusals[-1].removeprefix(_PREFIX))
    sys.stderr.write(done.stderr)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise ValueError(
            f"the process on the dry {gpu} ended with code {done.returncode}"
        ) from None


def _command(given: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest_gpumem.cli", *given, "--device", CUDA]
