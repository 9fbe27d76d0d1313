import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpumem

DATA = TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_epoch(workers, pinned):
    model = torch.nn.Linear(16, 4).cuda()
    for x, y in DataLoader(DATA, 16, num_workers=workers, pin_memory=pinned):
        loss = torch.nn.functional.cross_entropy(
            model(x.to("cuda", non_blocking=pinned)), y.to("cuda", non_blocking=pinned)
        )
        loss.backward()


def test_prefetched():
    loader = DataLoader(DATA, 16, num_workers=1, prefetch_factor=2, persistent_workers=True)
    kept = [x.cuda() for x, _ in loader]
    assert len(kept) == 4
