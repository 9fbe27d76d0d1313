"""An LSTM, a trainer with callbacks, a LoRA fine-tuning and a prefetching loader, with tests."""

from __future__ import annotations

LSTM = """
import torch.nn.functional as F
from torch import nn


class Language(nn.Module):
    def __init__(self, vocabulary=512, width=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, hidden=None):
        states, hidden = self.lstm(self.embedding(tokens), hidden)
        return self.head(states), hidden


def train(model, optimizer, text, length=32):
    hidden = None
    for chunk in text.split(length):
        logits, hidden = model(chunk, hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), chunk.flatten())
        loss.backward()
        hidden = tuple(part.detach() for part in hidden)
    optimizer.step()
    optimizer.zero_grad()
"""

LSTM_TESTS = """
from recurrent import Language, train


@pytest.mark.gpumem(baseline=True)
def test_text():
    model = Language().cuda()
    text = torch.zeros(128, 16, dtype=torch.long, device="cuda")
    train(model, torch.optim.Adam(model.parameters(), foreach=False), text)
"""

TRAINER = """
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Arguments:
    gradient_checkpointing = True
    batch_size = 4
    eval_batch_size = 4
    length = 128


class Encoder(nn.Module):
    def __init__(self, vocabulary=4096, width=128, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 512, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self):
        self.gradient_checkpointing = True

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Trainer:
    def __init__(self, model, arguments):
        self.model, self.arguments = model.cuda(), arguments
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.predictions = []
        self.history = []
        if arguments.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()

    def tokens(self, size):
        return torch.zeros(size, self.arguments.length, dtype=torch.long).cuda()

    def training_step(self, tokens):
        self.model.train()
        loss = self.model(tokens, tokens)["loss"]
        loss.backward()
        return loss.detach()

    def train(self, steps=3):
        for _ in range(steps):
            loss = self.training_step(self.tokens(self.arguments.batch_size))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.history.append(float(loss))

    @torch.no_grad()
    def evaluate(self, steps=4):
        self.model.eval()
        for _ in range(steps):
            logits = self.model(self.tokens(self.arguments.eval_batch_size))["logits"]
            self.predictions.append(logits.argmax(-1).cpu())
        return torch.cat(self.predictions)
"""

TRAINER_TESTS = """
from trainer import Arguments, Encoder, Trainer


@pytest.mark.gpumem(baseline=True)
def test_train():
    Trainer(Encoder(), Arguments()).train()


@pytest.mark.gpumem(baseline=True)
def test_evaluate():
    Trainer(Encoder(), Arguments()).evaluate(12)
"""

LORA = """
import torch.nn.functional as F
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.zeros(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.down.to(x.dtype).T) @ self.up.to(x.dtype).T


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def base(width=512, depth=3):
    return nn.Sequential(*(Mlp(width) for _ in range(depth))).to(torch.bfloat16)


def adapted(model):
    model.requires_grad_(False)
    for block in model:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model


def tune(model, steps=2, size=64):
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    for _ in range(steps):
        dtype = model[0].up.base.weight.dtype
        x = torch.zeros(size, 512, dtype=dtype, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

LORA_TESTS = """
from lora import adapted, base, tune


@pytest.mark.gpumem(baseline=True)
def test_tune():
    tune(adapted(base()).cuda())
"""

LOADER = """
from collections import deque

from torch import nn


class Prefetcher:
    def __init__(self, count, ahead=1, size=32):
        self.left, self.size = count, size
        self.queue = deque()
        for _ in range(ahead):
            self.load()

    def load(self):
        if self.left:
            self.left -= 1
            images = torch.zeros(self.size, 3, 96, 96)
            self.queue.append(images.to("cuda", non_blocking=True))

    def __iter__(self):
        while self.queue:
            batch = self.queue.popleft()
            self.load()
            yield batch


def features(loader):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten()).cuda()
    found = []
    with torch.no_grad():
        for batch in loader:
            found.append(net(batch).mean(-1).cpu())
    return found
"""

LOADER_TESTS = """
from loader import Prefetcher, features


@pytest.mark.gpumem(baseline=True)
def test_features():
    features(Prefetcher(6))
"""
