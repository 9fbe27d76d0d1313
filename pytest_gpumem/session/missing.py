"""After a run: baselines that no test uses, and tests whose baselines stand elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.baseline.store import BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.baseline.unused import unused_baselines
from pytest_gpumem.paths import relative
from pytest_gpumem.report.remarks import Missing

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.baseline.collected import Collected
    from pytest_gpumem.baseline.update import MeasuredTest
    from pytest_gpumem.options import Settings


def find_missing(
    config: pytest.Config,
    settings: Settings,
    tests: Sequence[MeasuredTest],
    collected: Collected,
) -> Missing:
    """Return the stored baselines that are not compared with anything."""
    store = BaselineStore(settings.baselines)
    return Missing(
        unused_baselines(store, tests, collected),
        _elsewhere(store, tests),
        relative(settings.baselines, config.invocation_params.dir).replace(os.sep, "/"),
    )


def _elsewhere(store: BaselineStore, tests: Sequence[MeasuredTest]) -> Counter[str]:
    """Return the number of tests without a baseline that have one elsewhere, by environment."""
    found: Counter[str] = Counter()
    for test in tests:
        module, test_id = split_nodeid(test.nodeid)
        try:
            if not test.wanted or store.entry(test.environment, module, test_id) is not None:
                continue
            known = store.elsewhere(module, test_id, test.environment)
        except BaselineError:
            continue
        found.update(environment.key for environment, _ in known)
    return found
