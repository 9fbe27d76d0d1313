"""The hooks that other plugins, and the conftest of a project, can implement; see docs/hooks.md.

This module imports only pytest, because it is loaded in every project with the plugin installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.baseline.verdict import Verdict
    from pytest_gpumem.values.environment import Environment
    from pytest_gpumem.values.measurement import Measurement


def pytest_gpumem_measured(item: pytest.Item, measurement: Measurement, outcome: str) -> None:
    """Receive the measurement of a test.

    Called once for each device that the test used, the judged one first, with the final numbers.

    :param item: the test; the hook is called in the process that ran it.
    :param measurement: peaks, leaks, phases and compositions, in bytes.
    :param outcome: ``passed``, ``failed``, ``xfailed`` or ``xpassed``. The numbers of a failed body
        do not cover the whole body.
    """


def pytest_gpumem_verdict(item: pytest.Item, verdict: Verdict) -> None:
    """Receive a verdict on a test.

    Called once for each limit, baseline or prediction that was compared, after
    :func:`pytest_gpumem_measured`; never for a test whose body failed.

    :param item: the test; the hook is called in the process that ran it.
    :param verdict: whether it ``passed``, with the numbers in bytes and the texts.
    """


def pytest_gpumem_environment(
    config: pytest.Config, environment: Environment
) -> Mapping[str, str] | None:
    """Return further facts that the numbers depend on, by name: ``{"kernels": "2.1"}``.

    They are part of the key of baselines, and appear in reports. Called once for each device,
    before the first test measured there, in plugins and in the conftest of the rootdir; the results
    of several implementations are merged.

    :param config: pytest's config.
    :param environment: the device, torch and settings, without the results of this hook.
    :return: words by name; a name is made of ``a-z``, ``0-9`` and ``_``.
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_category(
    item: pytest.Item,
    category: str,
    nbytes: int,
    frames: Sequence[Mapping[str, Any]],
    operator: str | None,
    shape: Sequence[int] | None,
    dtype: str | None,
) -> str | None:
    """Return the category of one block of a test's memory, ``None`` to keep ``category``.

    Called for blocks at a peak and in a time line; the first result that is not ``None`` counts.

    :param item: the test.
    :param category: the block's category without the hook.
    :param nbytes: its size after the allocator's rounding.
    :param frames: the Python frames of its allocation, innermost first, each with ``filename``,
        ``line`` and ``name``; empty if not recorded.
    :param operator: the operator's public name, ``torch.softmax``.
    :param shape: the shape of the tensor that it was allocated for; only on simulated devices.
    :param dtype: the dtype of that tensor: ``float32``.
    :return: one of ``parameters``, ``gradients``, ``optimizer state``, ``inputs``,
        ``activations``, ``workspace``, ``temporaries`` and ``other``.
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_site(item: pytest.Item, frames: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the frame whose line failures and reports show for an allocation.

    The default is the innermost frame outside torch and this plugin; a library can choose the line
    that calls it instead of its own. The first result that is not ``None`` counts.

    :param item: the test.
    :param frames: frames, innermost first, with ``filename``, ``line`` and ``name``; never empty.
    :return: an index of ``frames``.
    """
