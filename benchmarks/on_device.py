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
"""Each script's GPU, and the bytes of memory where these differ from that GPU's."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option to ``parser``; without the option only the simulated device is timed."""
    parser.add_argument(
        "--device",
        choices=("cuda", "dry"),
        help="time torch's own CUDA code, too: on this machine's GPU, or without kernels",
    )


def _begin() -> None:
    """Restart the process with a dry GPU where that is requested and absent."""
    gpu, memory = _GPUS.get(Path(sys.argv[0]).name, (None, None))
    if gpu is None or "dry" not in sys.argv or is_loaded():
        return
    variables = {**os.environ, **environment(gpu, memory)}
    if memory is not None:
        variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


_begin()
