"""Every program is a marked test; one whose package is missing is skipped by its name."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import numpy
import pytest
import torch

# No model, tokenizer or data set is fetched: all are made by the programs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["YOLO_OFFLINE"] = "true"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same data in each run, and leave out the same layers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*packages): the packages that the program is of")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpumem)
        for marker in item.iter_markers("needs"):
            for package in marker.args:
                if find_spec(package) is None:
                    item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))
