"""Workers of a DataLoader, forked from a simulating process: they have no GPU."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_gpumem import simulate
from tests.forked import REPOSITORY, quick

IN_CHILD = r"Cannot re-initialize CUDA in forked subprocess\. To use CUDA with multiprocessing, you"

pytestmark = [
    pytest.mark.skipif(
        multiprocessing.get_start_method() != "fork", reason="processes are not forked here"
    ),
    # A real process pool warns too: the interpreter does not copy other threads into a fork.
    pytest.mark.filterwarnings("ignore:This process"),
]


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for workers of a loader whose queue was collected before the loader."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


class Made(Dataset[Tensor]):
    """A dataset whose items are made on a given device."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(3, device=self.device) * index


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def test_workers_load_for_the_gpu() -> None:
    with simulate("T4") as gpu:
        batches = [batch.cuda() for batch in DataLoader(Made(), batch_size=2, num_workers=2)]
        assert [batch.tolist()[1][0] for batch in batches] == [1.0, 3.0]
        assert gpu.allocated == 2 * 512


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: TensorDataset(torch.rand(4, 3, device="cuda")),
        lambda: TensorDataset(torch.arange(4, device="cuda")),
        lambda: Made("cuda"),
    ],
    ids=["unknown", "known", "made"],
)
def test_cuda_in_a_worker_raises_torchs_error(dataset: Any) -> None:
    with simulate("T4"), pytest.raises(RuntimeError, match=IN_CHILD):
        list(DataLoader(dataset(), batch_size=2, num_workers=1))


def test_unknown_values_are_not_read_in_a_worker() -> None:
    with simulate("T4"):
        dataset = TensorDataset(torch.rand(4, 3, device="cuda").cpu())
        with pytest.raises(RuntimeError, match=r"a forked process.*\(num_workers=0\)"):
            list(DataLoader(dataset, batch_size=2, num_workers=1))


def test_a_default_device_of_cuda_reaches_workers(default_device: None) -> None:
    with simulate("T4"):
        with pytest.raises(RuntimeError, match=IN_CHILD):
            list(DataLoader(Made(), batch_size=2, num_workers=1))
        # Without workers even the seed is drawn on the GPU.
        assert [batch.is_cuda for batch in DataLoader(Made(), batch_size=2)] == [True, True]
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            list(DataLoader(Made(), batch_size=2, shuffle=True))


HAS_COMPILERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from pytest_gpumem import simulate

class HasCompilers(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return "torch._dynamo.eval_frame" in sys.modules

with simulate("T4"):
    torch.ones(3, device="cuda")
    print([bool(one) for one in DataLoader(HasCompilers(), num_workers=1)])
"""


def test_the_queue_thread_of_a_worker_imports_no_compilers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HAS_COMPILERS)
    ran = subprocess.run(
        [quick("plain"), script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    # The first item is sent before: a worker takes seconds to import them.
    assert ran.stdout == "[False, False, False]\n", ran.stderr
