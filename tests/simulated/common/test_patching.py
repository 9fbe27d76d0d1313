"""Patches that are undone for a while, where other code has patched the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def test_a_pause_restores_all_names(owner: SimpleNamespace, patches: Patches) -> None:
    applied = [patches.are_applied]
    with patches.paused():
        assert vars(owner) == {"name": "torch's"}
        applied.append(patches.are_applied)
    assert vars(owner) == {"name": "ours", "new": "ours"}
    assert [*applied, patches.are_applied] == [True, False, True]
    patches.undo()
    assert vars(owner) == {"name": "torch's"}


def test_a_pause_keeps_names_that_the_user_has_replaced_since(
    owner: SimpleNamespace, patches: Patches
) -> None:
    owner.name = "the user's"
    with patches.paused():
        assert vars(owner) == {"name": "the user's"}
    assert vars(owner) == {"name": "the user's", "new": "ours"}


def test_undo_restores_a_name_set_during_a_pause(owner: SimpleNamespace, patches: Patches) -> None:
    with patches.paused():
        owner.name = "torch's compiler's"
    assert owner.name == "ours"
    patches.undo()
    assert vars(owner) == {"name": "torch's compiler's"}


class Base:
    __slots__ = ()  # as a class written in C, it has no dictionary

    def inherited(self) -> str:
        return "torch's"


class Owner(Base):
    def own(self) -> str:
        return "torch's"


class Derived(Owner):
    def inherited(self) -> str:
        return f"the user's, then {super().inherited()}"


def test_names_that_a_class_inherits_are_replaced_by_one_class() -> None:
    patches = Patches()
    for name in ("inherited", "own", "new"):
        patches.add(Owner, name, lambda _: "ours")
    patches.join_inherited(Owner)
    assert [name for _, name, _ in patches.attributes] == ["own", "__bases__"]
    assert [name for _, name, _ in patches.added] == ["inherited", "own", "new"]
    before = vars(Owner).keys()
    patches.apply()
    made: Any = Owner()
    assert (made.inherited(), made.own(), made.new()) == ("ours",) * 3
    assert Derived().inherited() == "the user's, then ours"
    with patches.paused():
        assert (made.inherited(), hasattr(made, "new")) == ("torch's", False)
    assert made.inherited() == "ours"
    patches.undo()
    assert (made.inherited(), made.own()) == ("torch's", "torch's")
    assert (Owner.__bases__, vars(Owner).keys()) == ((Base,), before)
