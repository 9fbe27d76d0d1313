"""``gpumem devices``: the models of GPU that can be simulated."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pytest_gpumem.cli.command import Answer, Command, table, terminal_width
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.simulated.gpu.catalogue import GPUS
from pytest_gpumem.sizes import format_size

HEADER = ("model", "memory", "capability", "SMs", "L2 cache", "as torch names it")


def run(arguments: argparse.Namespace) -> Answer:
    """Return the catalogue."""
    rows = [
        (
            model.name,
            format_size(model.total_memory),
            ".".join(map(str, model.compute_capability)),
            str(model.sm_count),
            format_size(model.l2_cache_bytes),
            model.full_name,
        )
        for model in GPUS.values()
    ]
    return Answer(
        [
            *table([HEADER, *rows], left=(0, 5), given_up=(4, 3, 5), width=terminal_width()),
            "",
            f"without a model: {DEFAULT_GPU}; several GPUs in one machine: A100-80GB*8",
            "in pytest: --gpumem-device=sim:T4 or dry:T4; of a command: --gpu T4",
        ],
        lambda: {"default": DEFAULT_GPU, "models": [asdict(model) for model in GPUS.values()]},
    )


COMMAND = Command(
    description="List the models of GPU that tests and commands can run on without a GPU.",
    run=run,
    shows_state=True,
    json="as JSON, sizes in bytes",
    examples=("gpumem devices",),
)
