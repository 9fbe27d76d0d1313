"""Fixtures that tests share lie where a process has them in which the present test is the first."""

from __future__ import annotations

from tests.dry.conftest import Run

BEGIN = """
from dataclasses import astuple
from pytest_gpumem.dry.blocks import Blocks, LeftoverBlocks
from pytest_gpumem.dry.placing import Fixtures

KIB, MIB = 1 << 10, 1 << 20
made, renewed = {}, {}
blocks = Blocks()
leftover = LeftoverBlocks(blocks)
fixtures = Fixtures(blocks, leftover, lambda starts: lambda tensors: None)

def of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def begin(*wanted):
    def record(fixture, held, peak):
        renewed[fixture] = astuple(held[0]), astuple(peak[0])

    leftover.release()
    torch.cuda.empty_cache()
    renewed.clear()
    fixtures.begin([name for name, _ in wanted], made.__contains__, record)
    for name, set_up in wanted:
        if name not in made:
            with fixtures.setting_up(name):
                made[name] = set_up()
    fixtures.begin_body()
"""


def test_the_body_finds_the_room_beside_a_fixture_that_another_test_has_taken(
    dry_run: Run,
) -> None:
    """Small blocks share segments of 2 MiB; 768 KiB and 1 MiB fit into one, and no more does."""
    found = dry_run(
        BEGIN
        + """
values = torch.arange(192 * KIB, dtype=torch.int32)
wanted = "weights", lambda: values.cuda()
begin(wanted)
found["at first"] = made["weights"].data_ptr()
left = of(MIB)
begin(wanted)
found["then"] = made["weights"].data_ptr()
before = torch.cuda.memory_reserved()
own = of(MIB)
found["more"] = torch.cuda.memory_reserved() - before
found["held"] = renewed["weights"][0]
found["the same values"] = bool((made["weights"].cpu() == values).all())
begin(wanted)
found["in a third test"] = made["weights"].data_ptr()
"""
    )
    assert found["then"] != found["at first"]
    assert found["more"] == 0
    assert found["held"] == [768 << 10, 2 << 20]
    assert found["the same values"]
    assert found["in a third test"] != found["then"]  # "own" lies beside it


def test_they_lie_in_the_order_in_which_the_test_asks_for_them(dry_run: Run) -> None:
    """A set-up's temporary blocks are there, too: it needs 640 KiB for a moment, and keeps 512."""
    found = dry_run(
        BEGIN
        + """
def model():
    x = of(128 * KIB)
    return of(512 * KIB)

vocabulary, encoder = ("vocabulary", lambda: of(256 * KIB)), ("encoder", model)
begin(encoder)
begin(vocabulary, encoder)
found["distance"] = made["encoder"].data_ptr() - made["vocabulary"].data_ptr()
found["encoder"] = renewed["encoder"]
begin(vocabulary, encoder)
found["again"] = list(renewed)
begin(encoder, vocabulary)
found["the other way"] = made["vocabulary"].data_ptr() - made["encoder"].data_ptr()
"""
    )
    assert found["distance"] == (256 + 128) << 10
    held, peak = found["encoder"]
    assert held == [512 << 10, 0]
    assert peak == [640 << 10, 0]
    assert found["again"] == []
    assert found["the other way"] == 512 << 10


def test_what_only_torch_holds_stays_in_its_place(dry_run: Run) -> None:
    found = dry_run(
        BEGIN
        + """
def graph():
    return (torch.zeros(1000, device="cuda", requires_grad=True) * of(1000)).exp().sum()

begin(("loss", graph))
before = made["loss"].data_ptr()
begin(("table", lambda: of(KIB)), ("loss", graph))
found["moved"] = made["loss"].data_ptr() != before
"""
    )
    assert not found["moved"]


def test_parts_of_several_segments_are_filled_to_the_last_byte(dry_run: Run) -> None:
    """The allocator takes the smallest part that has room, which may be another segment's.

    Three tests leave 256 KiB, 1 MiB and 1,250 KiB, each in a segment of 2 MiB. The first megabyte
    for the largest free part, of 1,792 KiB, is the second segment's, which is free as a whole; the
    768 KiB that are left of it are the third's, of 798 KiB. Those no longer have room then, and
    their bytes are found in the first segment.
    """
    found = dry_run(
        BEGIN
        + """
left = []
for size in (256 * KIB, MIB, 1250 * KIB):
    leftover.fill_beside([])
    left.append(of(size) if size <= MIB else [of(MIB), of(size - MIB)])
    leftover.release()
    torch.cuda.empty_cache()
found["segments"] = [each["total_size"] for each in torch.cuda.memory_snapshot()]
leftover.fill_beside([])
found["filled"] = leftover.filled[0]
found["reserved"] = torch.cuda.memory_reserved()
own = of(1)
found["more"] = torch.cuda.memory_reserved() - found["reserved"]
"""
    )
    assert found["segments"] == [2 << 20] * 3
    assert found["reserved"] == 6 << 20
    assert found["filled"] == (6 << 20) - ((256 + 1024 + 1250) << 10)
    assert found["more"] == 2 << 20


def test_a_tensor_that_a_graph_has_overwritten_is_no_fixtures(dry_run: Run) -> None:
    """``torch.compile(mode="reduce-overhead")`` makes such tensors raise an error when read."""
    found = dry_run(
        BEGIN
        + """
overwritten, left = of(KIB), of(MIB)
storage = overwritten.untyped_storage()._cdata
torch._C._set_storage_data_ptr_access_error_msg(storage, "overwritten by a subsequent run")
begin(("weights", lambda: of(MIB)))
found["filled"] = leftover.filled[0]
"""
    )
    assert found["filled"] == (2 << 20) - (1 << 20) - 1024


def test_a_part_whose_whole_was_overwritten_has_no_graph(dry_run: Run) -> None:
    """FSDP leaves such tensors; torch raises an error when asked whether they are leaves."""
    found = dry_run(
        BEGIN
        + """
whole = torch.empty(KIB, device="cuda")
parts = whole.split(KIB // 2)
whole.copy_(torch.nn.Parameter(torch.empty(KIB, device="cuda")))
begin(("weights", lambda: of(KIB)))
found["filled"] = leftover.filled[0]
"""
    )
    assert found["filled"] == (2 << 20) - 2 * 4096


def test_the_mapped_part_of_an_expandable_segment_is_filled_too(dry_run: Run) -> None:
    """A test then maps 2 MiB and 20 MiB of its own, as in a new process."""
    found = dry_run(
        BEGIN
        + """
left = of(1), of(8 * MIB)
leftover.fill_beside([])
before = torch.cuda.memory_reserved()
own = of(1), of(8 * MIB)
found["more"] = torch.cuda.memory_reserved() - before
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert found["more"] == 22 << 20
