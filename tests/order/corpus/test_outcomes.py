import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpumem

TRIES = []


@pytest.mark.xfail
def test_expected_to_fail():
    x = torch.zeros(1 << 20, device="cuda")
    assert x.shape == (1,)


@pytest.mark.xfail
def test_expected_to_pass():
    torch.zeros(1 << 20, device="cuda")


@pytest.mark.flaky(reruns=1)
def test_passes_the_second_time():
    x = torch.zeros(1 << 20, device="cuda")
    TRIES.append(1)
    assert len(TRIES) % 2 == 0
    del x


@pytest.mark.xfail(raises=torch.OutOfMemoryError)
def test_out_of_memory():
    torch.zeros(1 << 40, device="cuda")


@pytest.mark.skip
def test_skipped():
    torch.zeros(1 << 40, device="cuda")


def test_catches_out_of_memory():
    kept = torch.zeros(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 40, device="cuda")
    kept.clone()


@pytest.mark.gpumem(max_leak=0)
@pytest.mark.xfail
def test_leaks():
    nn.leaked = torch.zeros(1 << 16, device="cuda")


def test_depends_on_values():
    x = torch.arange(10_000, device="cuda") % 7
    assert int((x == 3).sum()) == 1429


def test_reads_an_unknown_number():
    model = nn.Linear(64, 1).cuda()
    losses = [model(torch.randn(8, 64, device="cuda")).mean().item() for _ in range(3)]
    assert len(losses) == 3


def test_garbage_in_cycles():
    for _ in range(900):
        cycle = [torch.empty(1024, device="cuda")]
        cycle.append(cycle)


def test_garbage_of_exceptions():
    def fail():
        tensor = torch.empty(1 << 20, device="cuda")
        try:
            raise ValueError
        except ValueError as error:
            kept = error
        return tensor, kept

    for _ in range(3):
        fail()
