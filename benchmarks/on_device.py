"""The option ``--device`` of a benchmark, and the process that has the dry device.

Where that is asked for, the process starts itself anew when this module is imported, which has to
be before torch: a CUDA build is imported only where the runtime or NVIDIA's libraries are there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pytest_gpumem.dry.load import environment, is_loaded

TIB = 1024**4

_GPUS = {"training_step.py": ("A100-80GB", None), "large_model.py": ("H100", 2 * TIB)}
"""By script, its GPU, and bytes of memory other than that GPU's."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` know the option; without it only the simulated device is timed."""
    parser.add_argument(
        "--device",
        choices=("cuda", "dry"),
        help="time torch's own CUDA code, too: on this machine's GPU, or without kernels",
    )


def _begin() -> None:
    """Start the process anew with a dry GPU where that is asked for and not there."""
    gpu, memory = _GPUS.get(Path(sys.argv[0]).name, (None, None))
    if gpu is None or "dry" not in sys.argv or is_loaded():
        return
    variables = {**os.environ, **environment(gpu, memory)}
    if memory is not None:
        variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


_begin()
