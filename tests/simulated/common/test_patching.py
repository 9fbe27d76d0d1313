"""Replacements that are put back for a while, where others have replaced the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_gpumem.simulated.common.patching import Patches


@pytest.fixture
def owner() -> SimpleNamespace:
    return SimpleNamespace(name="torch's")


@pytest.fixture
def patches(owner: SimpleNamespace) -> Patches:
    made = Patches()
    made.add(owner, "name", "first")
    made.add(owner, "name", "ours")
    made.add(owner, "new", "ours")
    made.apply()
    return made


def test_a_pause_puts_everything_back(owner: SimpleNamespace, patches: Patches) -> None:
    applied = [patches.are_applied]
    with patches.paused():
        assert vars(owner) == {"name": "torch's"}
        applied.append(patches.are_applied)
    assert vars(owner) == {"name": "ours", "new": "ours"}
    assert [*applied, patches.are_applied] == [True, False, True]
    patches.undo()
    assert vars(owner) == {"name": "torch's"}


def test_a_pause_leaves_what_the_user_has_replaced_since(
    owner: SimpleNamespace, patches: Patches
) -> None:
    owner.name = "the user's"
    with patches.paused():
        assert vars(owner) == {"name": "the user's"}
    assert vars(owner) == {"name": "the user's", "new": "ours"}


def test_what_is_set_in_a_pause_comes_back(owner: SimpleNamespace, patches: Patches) -> None:
    with patches.paused():
        owner.name = "torch's compiler's"
    assert owner.name == "ours"
    patches.undo()
    assert vars(owner) == {"name": "torch's compiler's"}
