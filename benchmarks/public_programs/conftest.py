"""Every program is a marked test; one whose package is missing is skipped by its name."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# No model, tokenizer or data set is fetched: all are made by the programs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["YOLO_OFFLINE"] = "true"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*packages): the packages that the program is of")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpumem)
        for marker in item.iter_markers("needs"):
            for package in marker.args:
                if find_spec(package) is None:
                    item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))
