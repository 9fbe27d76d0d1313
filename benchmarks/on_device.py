"""The option ``--device`` of a benchmark, and the process that has the dry device."""

from __future__ import annotations

import argparse
import os
import sys

from pytest_gpumem.dry.load import environment, is_loaded


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` know the option; without it only the simulated device is timed."""
    parser.add_argument(
        "--device",
        choices=("cuda", "dry"),
        help="time torch's own CUDA code, too: on this machine's GPU, or without kernels",
    )


def begin(device: str | None, gpu: str, memory: int | None = None) -> None:
    """Start the process anew with a dry ``gpu`` where that is asked for and not there."""
    if device == "dry" and not is_loaded():
        variables = {**os.environ, **environment(gpu, memory)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)
