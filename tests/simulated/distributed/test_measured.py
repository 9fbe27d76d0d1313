"""Published measurements of one rank of several, to the digits that are printed."""

from __future__ import annotations

import pytest
from rank_configurations import CONFIGURATIONS
from several_ranks import compare

_QUICK = ("convolutions", "20 layers", "PP 2, A100")


@pytest.mark.parametrize(
    "index",
    [i for i, each in enumerate(CONFIGURATIONS) if any(one in each.what for one in _QUICK)],
    ids=lambda index: CONFIGURATIONS[index].what,
)
def test_simulated_peaks_equal_published_measurements(index: int) -> None:
    # Runs of one configuration differ by as much; the reason stands beside each number.
    for number in compare(index):
        assert abs(number.off) <= 0.015, (number.what, number.measured, number.simulated)
        assert number.note or not number.off


def test_the_table_has_more_than_twenty_configurations() -> None:
    assert len(CONFIGURATIONS) > 20
    assert all(each.stated for each in CONFIGURATIONS)
