"""Random numbers of tests on a device without a GPU: the same in any order of tests.

Allocations may depend on them, for example where a router sends tokens to experts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

SEED = 67280421310721
"""The seed of a CUDA generator before a program sets one (``default_rng_seed_val`` of
c10/core/GeneratorImpl.h, 2.6 to 2.15). Torch seeds the CPU's generator randomly."""


@contextmanager
def seeded_generators() -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch inside, and restore their states afterwards.

    GPU generators that did not exist before are seeded again instead.
    """
    with ExitStack() as restored:  # looked up now, because a test may patch the functions
        restored.callback(random.setstate, random.getstate())
        random.seed(SEED)
        numpy: Any = sys.modules.get("numpy")
        if hasattr(numpy, "random"):
            restored.callback(numpy.random.set_state, numpy.random.get_state(legacy=False))
            numpy.random.seed(SEED % 2**32)
        # torch.manual_seed would import the modules of other devices.
        generator = torch.default_generator
        restored.callback(generator.set_state, generator.get_state())
        generator.manual_seed(SEED)
        seed_gpus = torch.cuda.manual_seed_all
        states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        seed_gpus(SEED)
        if states:
            restored.callback(torch.cuda.set_rng_state_all, states)
        else:
            restored.callback(seed_gpus, SEED)
        yield
