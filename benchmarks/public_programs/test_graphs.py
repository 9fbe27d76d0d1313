"""Graph networks of torch_geometric."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional


@pytest.mark.needs("torch_geometric")
@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_torch_geometric(name: str) -> None:
    import torch_geometric

    net = getattr(torch_geometric.nn, name)
    model = net(in_channels=32, hidden_channels=64, num_layers=2, out_channels=7).cuda()
    data = torch_geometric.data.Data(
        x=torch.randn(200, 32),
        edge_index=torch.randint(0, 200, (2, 800)),
        y=torch.randint(0, 7, (200,)),
    ).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()
