import contextlib

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpumem

MODELS = {
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        (32, 64),
    ),
    "encoder": lambda: (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (4, 32, 64)),
    "normalized": lambda: (
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8)),
        (128, 64),
    ),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


def steps(model, optimizer, x, autocast=None, count=2):
    for _ in range(count):
        with torch.autocast("cuda", dtype=autocast) if autocast else contextlib.nullcontext():
            loss = model(x).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step(name, optimizer):
    model, size = MODELS[name]()
    model.cuda()
    steps(model, OPTIMIZERS[optimizer](model.parameters()), torch.randn(size, device="cuda"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name, dtype):
    model, size = MODELS[name]()
    model.cuda()
    x = torch.randn(size, device="cuda")
    steps(model, torch.optim.AdamW(model.parameters()), x, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_scaled_gradients(name):
    model, size = MODELS[name]()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(size, device="cuda")).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_accumulated_gradients():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()


def test_double_backward():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.norm().backward()


def test_averaged_weights():
    model = nn.Linear(64, 64).cuda()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 64, device="cuda"))
    averaged.update_parameters(model)


def test_lbfgs():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.ones(4, 8, device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_functional_gradients():
    model = nn.Linear(64, 64).cuda()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    each(parameters, torch.randn(8, 64, device="cuda"))


def recur(cell):
    layer = cell(16, 16, 2, dropout=0.5).cuda()
    output, _ = layer(torch.randn(4, 2, 16, device="cuda"))
    output.sum().backward()


def test_dropout_of_recurrent_layers():
    recur(nn.LSTM)
    torch.empty(24 << 20, dtype=torch.uint8, device="cuda")


def test_dropout_is_seeded_again():
    recur(nn.GRU)
    torch.manual_seed(1)
    recur(nn.GRU)
    recur(nn.LSTM)
