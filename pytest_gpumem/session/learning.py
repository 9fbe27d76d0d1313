"""Data on tests that is kept between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.sharing.learned import (
    FILE_NAME,
    IN_SHARDS,
    Learned,
    LearnedError,
    add_learned,
    read_learned,
)

INPUT = "gpumem_learned"
"""Key of a pytest-xdist worker's input: the data of earlier runs."""

WEIGHTS = "gpumem_weights"
"""Key of a pytest-xdist worker's input: the weights of shards, so that all workers agree."""


def cache_folder(config: pytest.Config) -> Path | None:
    """Return the plugin's folder in pytest's cache, ``None`` where pytest has no cache."""
    cache: Any = getattr(config, "cache", None)
    if cache is None:
        return None
    folder: Path = cache.mkdir("gpumem")
    return folder


def learned_before(config: pytest.Config) -> Learned:
    """Return the data of earlier runs; a worker receives it from the controller.

    All workers, on whatever host, then have the same data.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        return Learned.from_dict(worker.get(INPUT))
    learned = learned_of_whole_runs(config)
    if (folder := cache_folder(config)) is not None:
        learned.merge(read_learned(folder, IN_SHARDS))
    return learned


def learned_of_whole_runs(config: pytest.Config) -> Learned:
    """Return the data of runs without ``--gpumem-shard``, which determine shards."""
    folder = cache_folder(config)
    return Learned() if folder is None else read_learned(folder)


def keep(config: pytest.Config, learned: Learned, *, in_shard: bool) -> str | None:
    """Keep ``learned`` for later runs; return the sentence on the reason why it was not kept."""
    if not learned:
        return None
    try:
        folder = cache_folder(config)
        if folder is not None:
            add_learned(folder, learned, IN_SHARDS if in_shard else FILE_NAME)
    except (LearnedError, OSError) as error:
        return f"what tests took is not remembered: {error}"
    return None
