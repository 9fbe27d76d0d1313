"""Random numbers of tests on a device without a GPU: the same alone and after any other test.

What a test allocates may depend on them, as where a router sends tokens to experts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SEED = 67280421310721
"""The seed of a CUDA generator before a program sets one (``default_rng_seed_val`` of
c10/core/GeneratorImpl.h, 2.6 to 2.15). Torch seeds the CPU's by chance."""


_Restore = Callable[[], Any]


@contextmanager
def seeded_generators() -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch inside, and restore their states afterwards.

    Those of the GPUs are restored where there have been any; else they are seeded again.
    """
    restore = [*_seeded_on_host(), _seeded_on_gpus()]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _seeded_on_gpus() -> _Restore:
    """Seed the generators of the GPUs, and return the function that puts back what they were."""
    seed, put_back = torch.cuda.manual_seed_all, torch.cuda.set_rng_state_all  # a test may patch
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    seed(SEED)
    return lambda: put_back(states) if states else seed(SEED)


def _seeded_on_host() -> Iterator[_Restore]:
    """Seed the generators of the host, and yield functions that put back what they were."""
    python, put_back = random.getstate(), random.setstate
    random.seed(SEED)
    yield lambda: put_back(python)
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "random"):
        found, put_numpy_back = numpy.random.get_state(legacy=False), numpy.random.set_state
        numpy.random.seed(SEED % 2**32)
        yield lambda: put_numpy_back(found)
    # torch.manual_seed would import the modules of other devices.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(SEED)
    yield lambda: generator.set_state(state)
