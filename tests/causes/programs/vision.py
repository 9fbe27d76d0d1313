"""A residual CNN, a vision transformer and a diffusion UNet, each with its loop and its tests."""

from __future__ import annotations

CNN = """
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class CNN(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.stages = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


MEAN = [0.5, 0.5, 0.5]


def normalize(images):
    return images - torch.tensor(MEAN, device=images.device).view(3, 1, 1)


def epoch(model, optimizer, loader):
    running = 0.0
    for images, labels in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(normalize(images)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
    return running


def validate(model, loader):
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (model(normalize(images)).argmax(-1) == labels).sum()
    return right


def difficulty(model, loader):
    found = []
    for images, labels in loader:
        found.append(F.cross_entropy(model(normalize(images)), labels).item())
    return found


def batches(count, size=16, side=64):
    for _ in range(count):
        images = torch.zeros(size, 3, side, side).cuda()
        yield images, torch.zeros(size, dtype=torch.long).cuda()
"""

CNN_TESTS = """
from cnn import CNN, batches, difficulty, epoch, validate


@pytest.mark.gpumem(baseline=True)
def test_epoch():
    model = CNN().cuda()
    epoch(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches(4))


@pytest.mark.gpumem(baseline=True)
def test_normalized():
    model = CNN().cuda()
    validate(model, batches(3))


@pytest.mark.gpumem(baseline=True)
def test_difficulty():
    difficulty(CNN().cuda(), batches(4))
"""

VIT = """
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.between = nn.LayerNorm(width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.between(x))


class ViT(nn.Module):
    def __init__(self, width=128, heads=4, depth=3, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def fit(model, steps=2, side=64):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        images = torch.zeros(8, 3, side, side).cuda()
        labels = torch.zeros(8, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

VIT_TESTS = """
from vit import ViT, fit


@pytest.mark.gpumem(baseline=True)
def test_fit():
    fit(ViT().cuda())
"""

UNET = """
import torch.nn.functional as F
from torch import nn


class Down(nn.Module):
    def __init__(self, given, width):
        super().__init__()
        self.conv = nn.Conv2d(given, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Up(nn.Module):
    def __init__(self, given, width):
        super().__init__()
        self.conv = nn.ConvTranspose2d(given, width, 4, stride=2, padding=1)

    def forward(self, x):
        return F.silu(self.conv(x))


class UNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList([Down(width, 2 * width), Down(2 * width, 4 * width)])
        self.ups = nn.ModuleList([Up(4 * width, 2 * width), Up(4 * width, width)])
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x, when):
        x = self.stem(x) + self.time(when)[:, :, None, None]
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        for up in self.ups:
            x = torch.cat((up(x), skips.pop()), 1)
        return self.out(x)
"""

DIFFUSION = """
import torch.nn.functional as F


class Averages:
    def __init__(self, model):
        self.kept = {}

    def update(self, model):
        pass


def noisy(images, when):
    noise = torch.randn_like(images)
    return images + when[:, :, None, None] * noise, noise


def train(model, steps=3, size=4, side=32):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    averages = Averages(model)
    for _ in range(steps):
        images = torch.zeros(size, 3, side, side).cuda()
        when = torch.ones(size, 1, device="cuda")
        given, noise = noisy(images, when)
        loss = F.mse_loss(model(given, when), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update(model)


@torch.no_grad()
def sample(model, steps=4, size=16, side=32):
    x = torch.randn(size, 3, side, side, device="cuda")
    frames = []
    for step in range(steps):
        when = torch.full((size, 1), 1 - step / steps, device="cuda")
        x = x - model(x, when) / steps
        frames.append(x.cpu())
    return frames
"""

UNET_TESTS = """
from diffusion import sample, train
from unet import UNet


@pytest.mark.gpumem(baseline=True)
def test_train():
    train(UNet().cuda())


@pytest.mark.gpumem(baseline=True)
def test_sample():
    sample(UNet().cuda())
"""
