"""Compiled code: each test module has its own cache folder of wrappers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pytest_gpumem.simulated.common.compiled_notes import FOLLOWED_SINCE


@pytest.fixture(autouse=True, scope="module")
def wrappers_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if torch.__version__ < FOLLOWED_SINCE:
        pytest.skip(f"compiled code is followed since torch {FOLLOWED_SINCE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
