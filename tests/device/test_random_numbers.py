"""Seeded generators of a test: the same numbers each time, and no effect outside of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from pytest_gpumem import simulate
from pytest_gpumem.device.random_numbers import seeded_generators

Drawn = tuple[float, float, float, list[float]]


def draw() -> Drawn:
    """Return the next numbers of each generator of the host, and of the GPU."""
    on_gpu = torch.cuda.default_generators[0].get_state().tolist()
    torch.randn(3, device="cuda")
    return random.random(), float(np.random.rand()), float(torch.rand(())), on_gpu


def test_each_test_draws_the_same_numbers() -> None:
    with simulate("T4"):
        with seeded_generators():
            first = draw()
            draw()
        draw()
        with seeded_generators():
            assert draw() == first


def test_the_outer_generators_continue_after_a_test() -> None:
    with simulate("T4"):
        with seeded_generators():
            draw()
            expected = draw()
        with seeded_generators():
            draw()
            with seeded_generators():
                draw()
            assert draw() == expected


def test_generators_of_unused_gpus_stay_unseeded() -> None:
    with simulate("T4"):
        with seeded_generators():
            expected = draw()
        with seeded_generators():
            with seeded_generators():
                torch.randn(3, device="cuda")
            assert draw() == expected


def test_a_bit_generator_of_numpys_is_restored() -> None:
    """The legacy form of get_state(), in which NumPy warns, does not hold a PCG64 state."""
    numpy: Any = np.random  # whose types lack the two functions
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.PCG64(7))
    try:
        with simulate("T4"):
            with seeded_generators():
                np.random.rand()
            with seeded_generators():
                pass
        found = np.random.rand()
        numpy.set_bit_generator(np.random.PCG64(7))
        assert found == np.random.rand()
    finally:
        numpy.set_bit_generator(before)
