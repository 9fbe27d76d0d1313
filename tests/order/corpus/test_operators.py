import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.gpumem


def randn(*size, **options):
    return torch.randn(*size, device="cuda", **options)


OPERATORS = {
    "quantile": lambda: torch.quantile(randn(4096), 0.5),
    "nanquantile": lambda: torch.nanquantile(randn(64, 64), torch.tensor([0.1, 0.9]).cuda(), dim=1),
    "sort": lambda: randn(100_000).sort(),
    "topk": lambda: randn(64, 1000).topk(5),
    "median": lambda: randn(4096).median(),
    "cumsum": lambda: randn(100_000).cumsum(0),
    "unique": lambda: torch.tensor([1, 2, 2, 3]).cuda().unique(),
    "nonzero": lambda: torch.tensor([1, 0, 2]).cuda().nonzero(),
    "multinomial": lambda: torch.ones(100).cuda().multinomial(10),
    "one_hot": lambda: F.one_hot(torch.arange(10, device="cuda"), 100),
    "index_put": lambda: randn(100, 64).index_put_(
        (torch.arange(10, device="cuda"),), randn(10, 64), accumulate=True
    ),
    "masked_fill": lambda: randn(100, 100).masked_fill(
        torch.ones(100, 100, dtype=torch.bool, device="cuda").tril(), 0.0
    ),
    "setitem": lambda: randn(100).__setitem__(slice(0, 10), 1.0),
    "einsum": lambda: torch.einsum("bij,bjk->bik", randn(8, 64, 64), randn(8, 64, 64)),
    "batched product": lambda: randn(8, 64, 32) @ randn(8, 32, 64),
    "half product": lambda: randn(512, 512, dtype=torch.float16) @ randn(512, 512).half(),
    "svd": lambda: torch.linalg.svd(randn(32, 32)),
    "solve": lambda: torch.linalg.solve(randn(32, 32), randn(32, 4)),
    "fft": lambda: torch.fft.rfft(randn(16, 4096)),
    "interpolate": lambda: F.interpolate(randn(1, 3, 32, 32), scale_factor=2, mode="bilinear"),
    "cross_entropy": lambda: F.cross_entropy(
        randn(64, 1000, requires_grad=True), torch.zeros(64, dtype=torch.long, device="cuda")
    ).backward(),
    "ctc_loss": lambda: F.ctc_loss(
        randn(50, 4, 20).log_softmax(2),
        torch.ones(4, 10, dtype=torch.long, device="cuda"),
        torch.full((4,), 50),
        torch.full((4,), 10),
    ),
    "attention": lambda: F.scaled_dot_product_attention(*(randn(2, 8, 128, 64) for _ in range(3))),
    "half attention": lambda: (
        F.scaled_dot_product_attention(
            *(randn(2, 8, 128, 64).half().requires_grad_() for _ in range(3)), is_causal=True
        )
        .sum()
        .backward()
    ),
    "multi-head": lambda: (
        nn.MultiheadAttention(64, 4).cuda()(*[randn(16, 2, 64)] * 3)[0].sum().backward()
    ),
    "LSTM": lambda: nn.LSTM(64, 128, 2).cuda()(randn(16, 4, 64))[0].sum().backward(),
    "GRU both ways": lambda: nn.GRU(64, 64, bidirectional=True).cuda()(randn(16, 4, 64))[0].sum(),
    "packed LSTM": lambda: nn.LSTM(8, 8).cuda()(
        nn.utils.rnn.pack_padded_sequence(randn(5, 3, 8), [5, 3, 2])
    ),
    "convolution": lambda: nn.Conv2d(3, 64, 3).cuda()(randn(4, 3, 64, 64)).sum().backward(),
    "convolution of halves": lambda: (
        nn.Conv2d(64, 64, 3)
        .cuda()
        .half()(randn(4, 64, 32, 32, dtype=torch.float16))
        .sum()
        .backward()
    ),
    "channels last": lambda: (
        nn.Conv2d(64, 64, 3)
        .cuda()
        .to(memory_format=torch.channels_last)(
            randn(4, 64, 32, 32).to(memory_format=torch.channels_last)
        )
        .sum()
        .backward()
    ),
    "transposed convolution": lambda: nn.ConvTranspose2d(16, 8, 3).cuda()(randn(2, 16, 16, 16)),
    "convolution in three dimensions": lambda: nn.Conv3d(3, 8, 3).cuda()(randn(1, 3, 16, 16, 16)),
    "batch norm": lambda: nn.BatchNorm2d(64).cuda()(randn(8, 64, 16, 16)).sum().backward(),
    "max pool": lambda: F.max_pool2d(randn(2, 8, 32, 32, requires_grad=True), 2).sum().backward(),
    "embedding": lambda: (
        nn.Embedding(1000, 64).cuda()(torch.arange(100, device="cuda")).sum().backward()
    ),
    "sparse embedding": lambda: (
        nn.Embedding(1000, 64, sparse=True)
        .cuda()(torch.arange(100, device="cuda"))
        .sum()
        .backward()
    ),
    "sparse sum": lambda: torch.sparse_coo_tensor(
        torch.arange(64, device="cuda").repeat(2, 1), randn(64), (64, 64)
    ).coalesce(),
    "complex": lambda: torch.view_as_complex(randn(100, 2)).abs(),
    "pinned copy": lambda: torch.randn(1000).pin_memory().to("cuda", non_blocking=True).cpu(),
    "saved and loaded": lambda: __import__("copy").deepcopy(nn.Linear(64, 64).cuda()),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name):
    OPERATORS[name]()
