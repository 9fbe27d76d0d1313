"""What is kept of tests between runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.sharing.learned import (
    FILE_NAME,
    IN_SHARDS,
    Learned,
    LearnedError,
    add_learned,
    read_learned,
)

if TYPE_CHECKING:
    from pathlib import Path

INPUT = "gpumem_learned"
"""Key of a pytest-xdist worker's input: what earlier runs have learned."""

WEIGHTS = "gpumem_weights"
"""Key of a pytest-xdist worker's input: what shards are cut by, so that all workers agree."""


def cache_folder(config: pytest.Config) -> Path | None:
    """Return where this plugin keeps things between runs, ``None`` where pytest keeps nothing."""
    cache: Any = getattr(config, "cache", None)
    if cache is None:
        return None
    folder: Path = cache.mkdir("gpumem")
    return folder


def learned_before(config: pytest.Config) -> Learned:
    """Return what earlier runs have learned; a worker knows it from the controller.

    All workers, on whatever host, then know the same.
    """
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        return Learned.from_dict(worker.get(INPUT))
    learned = learned_of_whole_runs(config)
    if (folder := cache_folder(config)) is not None:
        learned.merge(read_learned(folder, IN_SHARDS))
    return learned


def learned_of_whole_runs(config: pytest.Config) -> Learned:
    """Return what runs without ``--gpumem-shard`` have learned, which is what shards are cut by."""
    folder = cache_folder(config)
    return Learned() if folder is None else read_learned(folder)


def keep(config: pytest.Config, learned: Learned, *, in_shard: bool) -> str | None:
    """Keep what was learned for later runs; return the sentence that says why it was not."""
    if not learned:
        return None
    try:
        folder = cache_folder(config)
        if folder is not None:
            add_learned(folder, learned, IN_SHARDS if in_shard else FILE_NAME)
    except (LearnedError, OSError) as error:
        return f"what tests took is not remembered: {error}"
    return None
