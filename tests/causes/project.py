"""A small GPT project: a model, its training and generation, and tests with baselines."""

from __future__ import annotations

MODEL = """
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, cache=None):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        if cache is not None:
            k, v = cache.extend(k, v)
        causal = cache is None
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x, cache=None):
        x = x + self.attn(self.norm(x), cache)
        return x + self.down(F.gelu(self.up(x * self.scale)))


class GPT(nn.Module):
    def __init__(self, vocabulary=2048, width=256, heads=4, layers=4, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, caches and caches[index])
        return self.head(x)


class Eyes(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(8, 64, 3, padding=1)
        self.mix = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, images):
        x = F.relu(self.patches(images))
        rows = x.permute(0, 2, 3, 1).contiguous()
        return self.mix(rows.sigmoid().permute(0, 3, 1, 2))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = (x * self.scale).sin()
        x = x.cos() + x.exp()
        return x.tanh() * x
"""

TRAINING = """
import torch.nn.functional as F


def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(model, optimizer, batches):
    losses = []
    for tokens in batches:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulate(model, optimizer, batches):
    for tokens in batches:
        loss = loss_of(model, tokens)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model, batches):
    found = []
    with torch.no_grad():
        for tokens in batches:
            found.append(model(tokens).argmax(-1))
    return found
"""

DATA = """
from torch.utils.data import DataLoader


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count, length):
        self.tokens = torch.zeros(count, length, dtype=torch.long)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def on_device(loader):
    for batch in loader:
        yield batch.to("cuda", non_blocking=True)


def batches(count=12, size=4, length=256):
    yield from on_device(DataLoader(Tokens(count, length), batch_size=size))
"""

GENERATION = """
class Cache:
    def __init__(self, batch, heads, length, width, dtype=torch.bfloat16):
        shape = batch, heads, length, width
        self.keys = torch.zeros(shape, dtype=dtype, device="cuda")
        self.values = torch.zeros(shape, dtype=dtype, device="cuda")
        self.length = 0

    def extend(self, k, v):
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end].to(k.dtype), self.values[:, :, :end].to(v.dtype)


def generate(model, tokens, steps):
    caches = [Cache(len(tokens), 4, 1024, 64) for _ in model.blocks]
    with torch.no_grad():
        for _ in range(steps):
            tokens = model(tokens[:, -1:], caches).argmax(-1)
    return tokens
"""

NORMALIZE = """
def normalized(x):
    return x / x.norm(dim=-1, keepdim=True)
"""

TESTS = """
from data import batches
from generation import generate
from model import GPT, Eyes, Mixer
from training import accumulate, evaluate, train

import normalize


def tokens(batch=4, length=256):
    return torch.randint(0, 2048, (batch, length), device="cuda")


def gpt(**options):
    return GPT(**options).cuda().bfloat16()


@pytest.mark.gpumem(baseline=True)
def test_training():
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, batches())


@pytest.mark.gpumem(baseline=True)
def test_momentum():
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, batches())


@pytest.mark.gpumem(baseline=True)
def test_checkpointed():
    model = gpt(checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, batches())


@pytest.mark.gpumem(baseline=True)
def test_accumulation():
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate(model, optimizer, batches())


@pytest.mark.gpumem(baseline=True)
def test_evaluation():
    evaluate(gpt(), batches())


@pytest.mark.gpumem(baseline=True)
def test_generation():
    generate(gpt(), tokens(length=1), steps=5)


@pytest.mark.gpumem(baseline=True)
def test_eyes():
    eyes = Eyes().cuda().half().to(memory_format=torch.channels_last)
    images = torch.zeros(8, 8, 128, 128, device="cuda", dtype=torch.half)
    images = images.to(memory_format=torch.channels_last)
    eyes(images).sum().backward()


@pytest.mark.gpumem(baseline=True)
def test_compiled():
    mixer = torch.compile(Mixer().cuda())
    mixer(torch.zeros(1 << 20, 4, device="cuda")).sum().backward()


@pytest.mark.gpumem(baseline=True, ranks=4, gpu="A100-40GB")
def test_sharded():
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, batches())


@pytest.mark.gpumem(baseline=True)
def test_normalized():
    with torch.no_grad():
        normalize.normalized(torch.zeros(1 << 22, 4, device="cuda"))


@pytest.mark.gpumem(max_leak=0)
def test_leaks():
    model = gpt()
    train(model, torch.optim.AdamW(model.parameters(), fused=True), batches())


@pytest.mark.gpumem(gpu="T4")
def test_long():
    model = GPT(layers=1).cuda().half()
    evaluate(model, [tokens(batch=4, length=16384)])
"""

FILES = {
    "model": MODEL,
    "training": TRAINING,
    "data": DATA,
    "generation": GENERATION,
    "test_gpt": TESTS,
}
