"""One rank of several: what others measured there, against the same programs under simulation.

    python benchmarks/several_ranks.py [NAME...]    configurations whose description contains one

Configurations, sources and known causes are in ``rank_configurations.py``. Two processes run them.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

import torch
from producers import sharded_tests
from rank_configurations import BOUNDS, CONFIGURATIONS, UNITS, Configuration
from single_numbers import Number, print_numbers

from pytest_gpumem import simulate

WORKERS = 2


def bytes_of(configuration: Configuration, rank: int) -> Sequence[int]:
    """What the program finds on one rank."""
    with simulate(
        configuration.gpu,
        world_size=configuration.ranks,
        rank=rank,
        torch_version=configuration.release,
        alloc_conf=configuration.settings,
        cublas_workspace_config=configuration.workspaces,
    ):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return configuration.program()


def compare(index: int) -> list[Number]:
    """The numbers of one configuration."""
    configuration = CONFIGURATIONS[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [bytes_of(configuration, rank) for rank in configuration.measured]
    numbers = []
    for stated, values in zip(configuration.stated, zip(*found, strict=True), strict=True):
        simulated = mean(values) / UNITS[configuration.unit]
        number = Number(
            f"{configuration.what}: {stated.point}",
            f"{configuration.source}, {configuration.ranks} ranks",
            stated.value,
            math.floor(simulated) if configuration.floors else simulated,
            configuration.unit,
            digits=configuration.digits,
        )
        numbers.append(number if not number.off else _explained(number, stated.cause))
    return numbers


def _explained(number: Number, cause: str) -> Number:
    values = {name: getattr(number, name) for name in Number.__dataclass_fields__}
    return Number(**{**values, "note": cause})


def rank_numbers(names: Sequence[str] = ()) -> Iterator[list[Number]]:
    """The numbers of each configuration whose description contains one of ``names``."""
    chosen = [
        index
        for index, each in enumerate(CONFIGURATIONS)
        if not names or any(name in each.what for name in names)
    ]
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        yield from pool.map(compare, chosen)


def bounds() -> Iterator[tuple[str, str, float, float]]:
    """Case, point, asserted upper bound and simulated MB of PyTorch's test of FSDP2."""
    for name, options in BOUNDS:
        with simulate("A100-40GB", world_size=2, torch_version="2.6", alloc_conf=""):
            for point in sharded_tests.per_parameter(**options):
                yield name, *point


def main() -> None:
    """Print both tables."""
    for found in rank_numbers(sys.argv[1:]):
        print_numbers(found)
    if not sys.argv[1:]:
        for name, point, bound, found_there in bounds():
            print(f"{name:34} {point:16} at most {bound:8.1f} MB {found_there:8.1f} MB")


if __name__ == "__main__":
    main()
