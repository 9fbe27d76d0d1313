"""A suite divided into shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.sharing.weights import Weight, fingerprint, split

weights = st.builds(
    Weight,
    name=st.text(max_size=8),
    seconds=st.none() | st.floats(0, 1e6, allow_nan=False),
    bytes=st.none() | st.integers(0, 2**40),
)
suites = st.lists(weights, unique_by=lambda test: test.name, max_size=30)


@given(tests=suites, count=st.integers(1, 12), order=st.randoms())
def test_every_test_is_in_one_shard_for_any_weights_and_any_order(
    tests: list[Weight], count: int, order: object
) -> None:
    parts = split(tests, count)
    assert len(parts) == count
    assert sorted(name for part in parts for name in part) == sorted(test.name for test in tests)
    shuffled = list(tests)
    order.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
    assert split(shuffled, count) == parts


def test_the_longest_test_goes_first_to_the_shortest_shard() -> None:
    seconds = {"a": 2.0, "b": 3.0, "c": 2.0, "d": 4.0, "e": 3.0, "f": 2.0}
    # d 4 | b 3, e 3 | then a and c to the first, f to the lesser of 8 and 6.
    parts = split([Weight(name, took, 0) for name, took in seconds.items()], 2)
    assert parts == [["a", "c", "d"], ["b", "e", "f"]]
    assert [sum(seconds[name] for name in part) for part in parts] == [8.0, 8.0]


def test_tests_of_unknown_duration_count_as_the_mean_of_the_others() -> None:
    tests = [Weight("a", 9.0, 0), Weight("b", 3.0, 0), Weight("c", None, 0), Weight("d", None, 0)]
    # 9 + 3 on one side, 6 + 6 on the other.
    assert split(tests, 2) == [["a", "b"], ["c", "d"]]


def test_shards_without_weights_have_equally_many_tests() -> None:
    parts = split([Weight(f"{index:02}") for index in range(10)], 4)
    assert sorted(map(len, parts)) == [2, 2, 3, 3]


def test_tests_without_duration_or_memory_are_spread_too() -> None:
    parts = split([Weight(f"{index:02}", 0.0, 0) for index in range(9)], 3)
    assert list(map(len, parts)) == [3, 3, 3]


def test_memory_is_spread_where_times_are_equal() -> None:
    large = [Weight(f"large{index}", 1.0, 10 << 30) for index in range(2)]
    small = [Weight(f"small{index}", 1.0, 1 << 20) for index in range(2)]
    for part in split([*large, *small], 2):
        assert sorted(name.rstrip("01") for name in part) == ["large", "small"]


def test_memory_counts_beside_time() -> None:
    long = Weight("long", 4.0, 0)
    large = [Weight(f"large{index}", 1.0, 4 << 30) for index in range(4)]
    small = [Weight(f"small{index}", 1.0, 0) for index in range(3)]
    # By time alone the long one would be with three small ones, and all large ones on the other.
    parts = split([long, *large, *small], 2)
    assert [sum(name.startswith("large") for name in part) for part in parts] == [2, 2]


@pytest.mark.parametrize(
    ("one", "other"), [([["a", "b"], []], [["a"], ["b"]]), ([["a"], ["b"]], [["b"], ["a"]])]
)
def test_a_fingerprint_identifies_a_split(one: list[list[str]], other: list[list[str]]) -> None:
    assert fingerprint(one) == fingerprint([list(part) for part in one])
    assert fingerprint(one) != fingerprint(other)
