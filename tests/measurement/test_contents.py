"""Objects of the user are read without running the user's code."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from typing import Any

import pytest
import torch

from pytest_gpumem.measurement.contents import attributes_of, is_a, items_of, tensors_in

TENSOR = torch.zeros(1)


class LoadsWhenAsked(OrderedDict[str, Any]):
    """A mapping like transformers' ``CONFIG_MAPPING``, which imports its values on access."""

    def values(self) -> Any:
        raise AssertionError("the values were asked for")

    items = __iter__ = values


class StandsFor:
    """A proxy of an object that does not exist yet, like Django's ``SimpleLazyObject``."""

    @property  # type: ignore[misc]  # proxies compute it
    def __class__(self) -> Any:
        raise AssertionError("the class was asked for")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


class OtherLength(tuple[Any, ...]):
    """A tuple whose ``len()`` is not its length."""

    def __len__(self) -> int:
        raise AssertionError("the length was asked for")


def test_values_of_a_lazy_mapping_are_not_read() -> None:
    mapping = LoadsWhenAsked()
    dict.__setitem__(mapping, "first", TENSOR)
    assert items_of(mapping) == [("first", TENSOR)]


def test_a_proxy_s_class_is_read_without_its_object() -> None:
    proxy = StandsFor()
    assert not is_a(proxy, torch.Tensor, dict)
    assert items_of(proxy) == []
    assert attributes_of(proxy) == {}
    assert list(tensors_in([proxy], 2)) == []


FILLED: list[Any] = [
    [TENSOR],
    (TENSOR,),
    OtherLength([TENSOR]),
    {TENSOR},
    deque([TENSOR]),
    {0: TENSOR},
    UserDict({0: TENSOR}),
    OrderedDict({0: TENSOR}),
]


@pytest.mark.parametrize("container", FILLED, ids=lambda container: type(container).__name__)
def test_items_of_containers_are_read(container: Any) -> None:
    assert items_of(container) == [(0, TENSOR)]
    assert list(tensors_in([container], 2)) == [TENSOR]
    assert list(tensors_in([container], 1)) == []


def test_only_the_first_items_of_a_long_container_are_read() -> None:
    assert items_of(range(3)) == []
    assert items_of([7, 8, 9], 2) == [(0, 7), (1, 8)]
