"""The holder of a tensor, named by the expression that leads to the tensor."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from textwrap import dedent
from types import ModuleType

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.measurement.leaks import holder_names
from pytest_gpumem.measurement.statistics import Block

PLACES = """
    KEPT = {}

    class Registry:
        entries = []

    class Node:
        def __init__(self, value):
            self.value = value
"""


pytestmark = pytest.mark.usefixtures("frozen")


@pytest.fixture
def places(frozen: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Yield a new module; searches find no module older than the freeze."""
    module = ModuleType("places")
    exec(dedent(PLACES), module.__dict__)
    monkeypatch.setitem(sys.modules, "places", module)
    return module


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with simulate("T4"):
        yield


def block(tensor: torch.Tensor) -> Block:
    return Block(0, tensor.data_ptr(), tensor.untyped_storage().nbytes())


def test_a_tensor_in_a_global_container_is_named(places: ModuleType) -> None:
    places.KEPT["losses"] = [None, torch.ones(128, device="cuda")]
    wanted = block(places.KEPT["losses"][1])
    assert holder_names(frozenset({wanted})) == {wanted.address: "places.KEPT['losses'][1]"}


def test_a_tensor_of_an_object_in_a_class_s_list_is_named(places: ModuleType) -> None:
    places.Registry.entries.append(places.Node(torch.ones(128, device="cuda")))
    wanted = block(places.Registry.entries[0].value)
    found = holder_names(frozenset({wanted}))
    assert found == {wanted.address: "places.Registry.entries[0].value"}


def generator(value: object) -> Iterator[object]:
    yield 0
    yield value


def started(value: object) -> Iterator[object]:
    found = generator(value)
    next(found)
    return found


def remembering(value: object) -> object:
    remember = lru_cache(lambda: value)
    remember()
    return remember


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda value: lambda: value, ""),
        (lambda value: lambda found=value: found, ""),
        (lambda value: partial(print, value), ""),
        (started, ""),
        (remembering, ""),
        (Slots, ""),
        (lambda value: Slots(value).method, ""),
        (lambda value: {value}, ""),
        (lambda value: [{value}], "[0]"),
        (lambda value: deque([0, value]), "[1]"),
        (lambda value: {torch.ones(2): [value]}, "[...][0]"),
    ],
    ids=lambda keep: None,
)
def test_an_object_without_named_parts_is_named_as_a_whole(
    places: ModuleType, keep: Callable[[object], object], path: str
) -> None:
    value = torch.ones(128, device="cuda")
    wanted = block(value)
    places.KEPT["it"] = keep(value)
    del value

    assert holder_names(frozenset({wanted})) == {wanted.address: f"places.KEPT['it']{path}"}


def test_an_attribute_is_named_after_another_search_has_read_it(places: ModuleType) -> None:
    node = places.Node({"near": torch.ones(128, device="cuda")})
    node.far = [[torch.ones(128, device="cuda")]]
    wanted = {block(node.value["near"]), block(node.far[0][0])}
    places.KEPT["node"] = node
    del node

    assert set(holder_names(frozenset(wanted)).values()) == {
        "places.KEPT['node'].value['near']",
        "places.KEPT['node'].far[0][0]",
    }


def test_a_gradient_is_named_as_grad_of_its_tensor(places: ModuleType) -> None:
    places.KEPT["weight"] = torch.ones(128, device="cuda", requires_grad=True)
    (places.KEPT["weight"] * 2).sum().backward()
    wanted = block(places.KEPT["weight"].grad)
    assert holder_names(frozenset({wanted})) == {wanted.address: "places.KEPT['weight'].grad"}


def test_a_tensor_that_autograd_saved_is_held_by_the_graph(places: ModuleType) -> None:
    weight = torch.ones(128, device="cuda", requires_grad=True)
    saved = weight * 2
    wanted = block(saved)
    places.KEPT["loss"] = [(saved * saved).sum()]
    del saved
    found = holder_names(frozenset({wanted}))
    assert found == {wanted.address: "the graph of places.KEPT['loss'][0]"}


def test_a_view_whose_graph_is_gone_does_not_disturb_a_search() -> None:
    """Its base was overwritten, so torch raises an error when its ``grad_fn`` is read."""
    base = torch.ones(4, 4, device="cuda", requires_grad=True) * 2
    row, _, _, _ = base.unbind()
    base.mul_(3)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = row.grad_fn
    assert "grad_fn=<Invalid>" in repr(row)

    assert holder_names(frozenset({Block(0, 12345, 512)})) == {}


def test_a_block_without_a_holder_is_left_out() -> None:
    assert holder_names(frozenset({Block(0, 12345, 512)})) == {}


def test_an_attribute_in_the_dictionary_of_an_object_is_named(places: ModuleType) -> None:
    node = places.Node(torch.ones(128, device="cuda"))
    attributes = vars(node)
    places.KEPT["nodes"] = [node]
    wanted = block(attributes["value"])

    found = holder_names(frozenset({wanted}))

    assert found[wanted.address] in {"places.KEPT['nodes'][0].value", "attributes['value']"}


def test_a_thousand_tensors_among_many_objects_take_little_longer_than_ten(
    places: ModuleType,
) -> None:
    places.KEPT["many"] = [[{"object": number}] for number in range(250_000)]
    places.Registry.entries.extend(places.Node(torch.ones(128, device="cuda")) for _ in range(1000))
    wanted = frozenset(block(node.value) for node in places.Registry.entries)
    seconds = []
    for blocks in (frozenset(sorted(wanted, key=lambda one: one.address)[:10]), wanted):
        start = time.process_time()
        found = holder_names(blocks)
        seconds.append(time.process_time() - start)

    # One pass over all objects serves all tensors; one pass each would take a hundred times longer.
    assert seconds[1] < 5 * seconds[0]
    assert found[block(places.Registry.entries[999].value).address] == (
        "places.Registry.entries[999].value"
    )
    assert len(found) == 1000
