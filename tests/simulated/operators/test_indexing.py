"""Indexing by integers and by masks: temporaries as recorded on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.operators.cub import alias_temporaries, radix_sort_pairs_bytes


def test_backward_of_a_lookup_by_index(on: Any) -> None:
    # NiuHuangxiaozi/assignment2-systems, forward and backward, context 100.
    gpu = on("RTX-4060", "2.6")
    table = torch.randn(10_000, 512, device="cuda", requires_grad=True)
    rows = table[torch.zeros(10, 100, dtype=torch.long, device="cuda")]
    gradient = torch.ones_like(rows)
    events = gpu.of(lambda: rows.backward(gradient))
    assert events[:13] == [
        20_480_000,  # the gradient, zeroed
        8000, 8000, -8000,  # remainder, times the stride
        8000, 8000, 8000,  # sorted and original indices, range
        1, -1,  # one block sorts a thousand pairs
        -8000, -8000, -8000, -8000,
    ]  # fmt: skip


def test_index_put_without_accumulation_allocates_nothing(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    where = torch.zeros(10, dtype=torch.long, device="cuda")
    rows = torch.ones(10, 8, device="cuda")
    assert gpu.of(lambda: table.index_put_((where,), rows)) == []


@pytest.mark.parametrize(
    ("count", "capability", "tile"),
    [(100_000, (7, 0), 256 * 11), (100_000, (8, 0), 384 * 10), (100_000, (9, 0), 384 * 12)],
)
def test_onesweep_storage(count: int, capability: tuple[int, int], tile: int) -> None:
    blocks = -(-count // tile)
    expected = alias_temporaries(2 * 256 * 8, blocks * 256 * 4, count * 8, count * 8, 8)
    assert radix_sort_pairs_bytes(count, 8, 8, 14, capability) == expected


def test_where_makes_a_tensor_of_its_number(on: Any) -> None:
    gpu = on()
    mask = torch.ones(16, dtype=torch.bool, device="cuda")
    values = torch.ones(16, device="cuda")
    assert gpu.of(lambda: torch.where(mask, values, 0.0)) == [4, 64, -4]


def test_numbers_written_through_indices_become_gpu_tensors(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    where = torch.zeros(10, dtype=torch.long, device="cuda")
    assert gpu.of(lambda: table.index_put_((where,), torch.tensor(1.0))) == [4, -4]

    def write() -> None:
        table[[1, 2]] = 1.0

    # Since 2.15 the number is an argument of index_fill_.
    number = [4, -4] if torch.__version__ < "2.15" else []
    assert gpu.of(write) == [16, *number, -16]

    def write_nowhere() -> None:
        table[1, []] = 1.0

    assert gpu.of(write_nowhere) == number


def test_numbers_written_through_masks_become_no_gpu_tensors(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    mask = torch.zeros(100, 8, dtype=torch.bool, device="cuda")

    def write() -> None:
        table[mask] = 1.0

    assert gpu.of(write) == []


def test_lists_of_indices_are_tensors_on_the_device(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    assert gpu.of(lambda: table[[1, 2, 3]]) == [24, 96, -24]


def test_where_brings_numbers_from_the_cpu(on: Any) -> None:
    gpu = on()
    mask = torch.ones(16, dtype=torch.bool, device="cuda")
    values = torch.ones(16, device="cuda")
    assert gpu.of(lambda: torch.where(mask, values, torch.tensor(0.0))) == [4, 64, -4]


def test_powers_of_a_number(on: Any) -> None:
    # notHanmin/assignment2-systems: 10_000 ** x, an eight-byte tensor beside the result.
    gpu = on()
    x = torch.zeros(32, device="cuda")
    assert gpu.of(lambda: 10_000**x) == [128, 8, -8]


def test_masked_fill_reads_a_number_on_the_cpu(on: Any) -> None:
    gpu = on()
    x, mask = torch.zeros(16, device="cuda"), torch.ones(16, dtype=torch.bool, device="cuda")
    assert gpu.of(lambda: x.masked_fill(mask, torch.tensor(-1.0))) == [64]


def test_a_known_mask_is_placed_by_a_selection(on: Any) -> None:
    # Constructor-Sun/code_location: all of 1,578 flags are set.
    gpu = on("A100-40GB", "2.8")
    mask = torch.ones(1578, dtype=torch.bool).cuda()
    assert gpu.of(mask.nonzero) == [4, 1, -1, 12_624, 767, -767, -4]


def test_an_index_on_the_cpu_is_copied_for_the_lookup(on: Any) -> None:
    # kkaitlyn111/cs336-a2-systems, first training step: x[arange(512), targets], and its backward.
    gpu = on("H100", "2.6")
    x = torch.randn(512, 10_000, device="cuda", requires_grad=True)
    targets = torch.zeros(512, dtype=torch.long, device="cuda")
    chosen = []
    assert gpu.of(lambda: chosen.append(x[torch.arange(512), targets])) == [4096, 2048, -4096]

    gradient = torch.ones(512, device="cuda")
    assert gpu.of(lambda: chosen[0].backward(gradient))[:13] == [
        20_480_000,  # the gradient, zeroed
        4096,  # rows, wrapped and scaled on the CPU
        4096, 4096, -4096, -4096,  # targets: remainder, times the stride, added to the rows
        4096, 4096, 4096,  # sorted and original indices, range
        1, -1,
        -4096, -4096,
    ]  # fmt: skip


def test_32_bit_indices_are_widened_for_the_lookup(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    where = torch.zeros(10, dtype=torch.int32, device="cuda")
    assert gpu.of(lambda: table[where]) == [80, 320, -80]


def test_32_bit_indices_are_widened_to_accumulate(on: Any) -> None:
    """As on the dry device with torch 2.11, 2.13 and 2.15."""
    gpu = on("H100", "2.11")
    table, where = torch.zeros(1000, device="cuda"), torch.zeros(1000, dtype=torch.int32).cuda()
    rows = torch.ones(1000, device="cuda")
    assert gpu.of(lambda: table.index_put_((where,), rows, accumulate=True)) == [
        8000,  # in 64 bits, until the places in the table are known
        8, 1, -1, -8, 8, 1, -1, -8,
        8000, 8000, -8000, -8000,
        8000, 8000, 8000, 1, -1,
        -8000, -8000, -8000, -8000,
    ]  # fmt: skip


def test_indices_that_are_broadcast_across_each_other_become_contiguous(on: Any) -> None:
    gpu = on()
    table, where = torch.randn(256, 512, device="cuda"), torch.arange(100).cuda()
    both = 100 * 100 * 8
    # Each of the two has 64 bits for each selected element.
    assert gpu.of(lambda: table[where[:, None], where]) == [both, both, 40_000, -both, -both]
    assert gpu.of(lambda: table[where, where]) == [400]


@pytest.mark.parametrize(
    ("release", "check"),
    [("2.11", [8, 1, -1, -8, 8, 1, -1, -8]), ("2.13", [8, 8, 1, -1, 1, -1, -8, -8])],
)
def test_indices_of_the_user_are_checked(on: Any, release: str, check: list[int]) -> None:
    gpu = on(version=release)
    table, where = torch.zeros(100, 8, device="cuda"), torch.arange(10).cuda()
    rows = torch.ones(10, 8, device="cuda")
    index = 80
    assert gpu.of(lambda: table.index_put_((where,), rows, accumulate=True)) == [
        *check,
        index, index, -index, index, index, index, 1, -1, -index, -index, -index, -index,
    ]  # fmt: skip


TOTAL = [4, 1, -1]
"""How many elements a mask sets, and its partial sums."""
SCAN = [1279, -1279]


def known_mask() -> torch.Tensor:
    """Return 25 flags, of which 12 are set."""
    return (torch.arange(25) % 2 == 1).reshape(5, 5).cuda()


def test_masks_are_placed_by_prefix_sums_as_on_an_h100(on: Any) -> None:
    gpu = on("H100", "2.11")
    into, mask, row = torch.zeros(5, 5, device="cuda"), known_mask(), torch.ones(5).cuda() > 0
    source = torch.ones(25, device="cuda")
    assert gpu.of(lambda: into.masked_scatter(mask, source)) == [100, 200, *SCAN, -200]
    assert gpu.of(lambda: into.masked_scatter_(mask, source)) == [200, *SCAN, -200]
    # An expanded mask is copied, and a source that is not contiguous, once the sums are there.
    assert gpu.of(lambda: into.masked_scatter_(row, source)) == [200, 25, *SCAN, -25, -200]
    columns = torch.ones(25, 2, device="cuda")[:, 0]
    assert gpu.of(lambda: into.masked_scatter_(mask, columns)) == [200, *SCAN, 100, -100, -200]


def test_gradients_of_masks_as_on_an_h100(on: Any) -> None:
    gpu = on("H100", "2.11")
    given = torch.ones(5, 5, device="cuda", requires_grad=True)
    mask = known_mask()
    chosen = given.masked_select(mask)
    gradient = torch.ones_like(chosen)
    events = gpu.of(lambda: chosen.backward(gradient))
    assert events == [100, 200, *SCAN, -200]

    source = torch.ones(25, device="cuda", requires_grad=True)
    whole = torch.zeros(5, 5, device="cuda").masked_scatter(mask, source)
    gradient = torch.ones_like(whole)
    places, flagged, elements = 12 * 2 * 8, 1023, 12 * 4
    missing = 100 - elements
    assert gpu.of(lambda: whole.backward(gradient)) == [
        *TOTAL, places, flagged, -flagged, -4, elements, -places, missing, 100, -missing, -elements,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("release", "looks"), [("2.11", [3, 1, -1, -3]), ("2.15", [8, -8])], ids=str
)
def test_repeat_interleave_scans_its_repeats(on: Any, release: str, looks: list[int]) -> None:
    gpu = on("H100", release)
    repeats = torch.tensor([1, 2, 0]).cuda()
    assert gpu.of(lambda: repeats.repeat_interleave(repeats)) == [
        24, *SCAN, *looks, 24, -24, 24, -24,
    ]  # fmt: skip
    assert gpu.of(lambda: torch.repeat_interleave(repeats, output_size=3)) == [
        24, *SCAN, 24, -24,
    ]  # fmt: skip


def test_index_put_counts_its_mask_after_copying_the_tensor(on: Any) -> None:
    gpu = on("H100", "2.11")
    table, mask = torch.ones(5, 5, device="cuda"), torch.ones(5, device="cuda") > 0
    numbers = torch.ones(5, device="cuda")
    events = gpu.of(lambda: table.index_put((mask,), numbers))
    assert events == [100, *TOTAL, 40, 1023, -1023, -4, -40]


def test_nonzero_of_an_empty_tensor_counts_too(on: Any) -> None:
    gpu = on("H100", "2.11")
    empty = torch.ones(5, 0, device="cuda")
    assert gpu.of(lambda: empty.argwhere()) == [*TOTAL, 767, -767, -4]


def test_copies_of_layouts_come_first(on: Any) -> None:
    # As on the dry device with torch 2.15: adding at a mask copies what has gaps before it counts.
    gpu = on()
    turned = torch.ones(5, 5, device="cuda").t()
    mask = torch.tensor([True, False, True, True, True], device="cuda")
    values = torch.ones(4, 5, device="cuda")
    assert gpu.of(lambda: turned.index_put_((mask,), values, accumulate=True))[:3] == [100, 4, 1]
    data = torch.ones(5, 5, 10, device="cuda").transpose(0, -1)
    lengths = torch.full((5,), 2, device="cuda")
    reduced = gpu.of(lambda: torch.segment_reduce(data, "min", lengths=lengths, unsafe=True))
    assert reduced[:3] == [1000, 500, 8]
    reflectors, scales = torch.ones(2, 6, 5, device="cuda"), torch.ones(5, 2, device="cuda").t()
    product = gpu.of(lambda: torch.linalg.householder_product(reflectors, scales))
    assert product[:3] == [240, 40, 4]
