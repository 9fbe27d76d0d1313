"""What everybody's tests do, each with numbers of its own: the first that a GPU was asked about.

pytest test_everyday.py --gpumem-device=cuda --gpumem-report json:gpu.json
pytest test_everyday.py --gpumem-device=dry:H100 --gpumem-report json:dry.json
gpumem compare gpu.json dry.json --all
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BF16 = torch.bfloat16


def perceptron(*sizes: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), activation()]
    return nn.Sequential(*layers)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return perceptron(512, 1024, 1024, 256).cuda()


def test_sgd(model: nn.Module, gpumem: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(64, 512, device="cuda")
    for _ in range(3):
        with gpumem.phase("forward"):
            loss = model(x).square().mean()
        with gpumem.phase("backward"):
            loss.backward()
        with gpumem.phase("step"):
            optimizer.step()
            optimizer.zero_grad()


OPTIMIZERS = """
    Adam AdamW Adagrad RMSprop Adafactor NAdam Adamax Rprop ASGD RAdam Adadelta LBFGS
""".split()
WAYS = {"default": {}, "loop": {"foreach": False}, "fused": {"fused": True}}
LACKING = {"Adagrad fused", "Adafactor fused", "LBFGS loop", "LBFGS fused"} | {
    f"{name} fused" for name in OPTIMIZERS[3:]
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_optimizers(model: nn.Module, name: str, way: str) -> None:
    if f"{name} {way}" in LACKING:
        pytest.skip(f"{name} has no such implementation")
    optimizer = getattr(torch.optim, name)(model.parameters(), **WAYS[way])
    x = torch.randn(64, 512, device="cuda")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found: Tensor = model(x).square().mean()
        found.backward()
        return found

    for _ in range(2):
        optimizer.step(loss)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
def test_autocast(model: nn.Module, dtype: torch.dtype) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    x = torch.randn(256, 512, device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_checkpoint(reentrant: bool, autocast: bool) -> None:
    blocks = nn.ModuleList([perceptron(512, 2048, 512) for _ in range(4)]).cuda()
    hidden = torch.randn(512, 512, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=BF16, enabled=autocast):
        for block in blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=reentrant)
        hidden.float().sum().backward()


BACKENDS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "any": [
        *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["none", "causal", "float"])
def test_attention(backend: str, mask: str) -> None:
    if (backend, mask) == ("flash", "float"):
        pytest.skip("flash attention takes no mask")
    query, key, value = (
        torch.randn(4, 8, 512, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)
    )
    given = {"is_causal": mask == "causal"}
    masked = torch.zeros(512, 512, device="cuda", dtype=BF16) if mask == "float" else None
    with sdpa_kernel(BACKENDS[backend]):
        found = functional.scaled_dot_product_attention(query, key, value, masked, **given)
        found.sum().backward()


@pytest.mark.parametrize("kind", ["encoder", "decoder", "attention", "attention with weights"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transformer_layers(kind: str, mode: str) -> None:
    x = torch.randn(8, 256, 256, device="cuda")
    if kind == "encoder":
        layer: nn.Module = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True).cuda()
        given: tuple[Tensor, ...] = (x,)
    elif kind == "decoder":
        layer, given = nn.TransformerDecoderLayer(256, 8, 1024, batch_first=True).cuda(), (x, x)
    else:
        layer, given = nn.MultiheadAttention(256, 8, batch_first=True).cuda(), (x, x, x)
    named = {"need_weights": "weights" in kind} if "attention" in kind else {}
    layer.train(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        found = layer(*given, **named)
        if mode == "train":
            (found[0] if isinstance(found, tuple) else found).sum().backward()


VISION = """
    resnet18 resnet50 mobilenet_v3_small efficientnet_b0 convnext_tiny vgg11 densenet121 swin_t
    vit_b_16 regnet_y_400mf shufflenet_v2_x1_0 googlenet
""".split()


@pytest.mark.needs("torchvision")
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("autocast", [False, True], ids=["f32", "amp"])
def test_vision(name: str, autocast: bool) -> None:
    import torchvision

    given = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    model = getattr(torchvision.models, name)(weights=None, **given).cuda()
    x = torch.randn(4, 3, 224, 224, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with torch.autocast("cuda", dtype=BF16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.needs("torchvision")
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v3_small", "convnext_tiny"])
def test_channels_last(name: str) -> None:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).cuda().eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        model(x)


NARROW = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 5000}
GATED = {**NARROW, "intermediate_size": 688}
LANGUAGE: dict[str, tuple[str, str, dict[str, int]]] = {
    "GPT2": ("GPT2", "LMHeadModel", {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 5000}),
    "Llama": ("Llama", "", {**GATED, "num_hidden_layers": 3, "num_key_value_heads": 4}),
    "Qwen2": ("Qwen2", "", {**GATED, "num_hidden_layers": 3, "num_key_value_heads": 2}),
    "Gemma": (
        *("Gemma", ""),
        {**GATED, "num_attention_heads": 4, "num_hidden_layers": 2}
        | {"num_key_value_heads": 1, "head_dim": 64},
    ),
    "Mistral": ("Mistral", "", {**GATED, "num_hidden_layers": 2, "num_key_value_heads": 4}),
    "Bert": ("Bert", "ForMaskedLM", {**NARROW, "intermediate_size": 512, "num_hidden_layers": 3}),
    "OPT": ("OPT", "", {**NARROW, "ffn_dim": 512, "num_hidden_layers": 2}),
    "Phi": ("Phi", "", {**NARROW, "intermediate_size": 512, "num_hidden_layers": 2}),
    "GPTNeoX": ("GPTNeoX", "", {**NARROW, "intermediate_size": 512, "num_hidden_layers": 2}),
    "Mixtral": (
        *("Mixtral", ""),
        {**NARROW, "intermediate_size": 512, "num_hidden_layers": 2}
        | {"num_key_value_heads": 4, "num_local_experts": 4},
    ),
}


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("mode", ["f32", "amp", "bf16", "checkpointed", "generate"])
def test_language(name: str, mode: str, gpumem: Any) -> None:
    import transformers

    if (name, mode) == ("Bert", "generate"):
        pytest.skip("an encoder does not generate")
    prefix, suffix, sizes = LANGUAGE[name]
    torch.manual_seed(0)
    with gpumem.phase("build"):
        settings = getattr(transformers, f"{prefix}Config")(**sizes)
        model = getattr(transformers, f"{prefix}{suffix or 'ForCausalLM'}")(settings).cuda()
        if mode == "bf16":
            model = model.bfloat16()
    words = torch.randint(0, 5000, (4, 128), device="cuda")
    if mode == "generate":
        ends = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        with gpumem.phase("generate"):
            model.eval().generate(words[:, :16], max_new_tokens=20, **ends)
        return
    if mode == "checkpointed":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for _ in range(2):
        with torch.autocast("cuda", dtype=BF16, enabled=mode == "amp"), gpumem.phase("forward"):
            loss = model(input_ids=words, labels=words).loss
        with gpumem.phase("backward"):
            loss.backward()
        with gpumem.phase("step"):
            optimizer.step()
            optimizer.zero_grad()


def test_cuda_graph() -> None:
    model, x = perceptron(256, 256, 256).cuda(), torch.randn(32, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    y.sum().item()


OPERATORS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sort": lambda x, _: x.sort(),
    "topk": lambda x, _: x.topk(min(500, len(x))),
    "unique": lambda _, i: i.unique(return_inverse=True, return_counts=True),
    "cumsum": lambda x, _: x.cumsum(0),
    "argsort": lambda _, i: i.argsort(stable=True),
    "nonzero": lambda x, _: (x > 0.5).nonzero(),
    "median": lambda x, _: x.median(),
    "kthvalue": lambda x, _: x.kthvalue(5),
    "mode": lambda _, i: i[:5000].mode(),
    "bincount": lambda _, i: i.bincount(),
    "histc": lambda x, _: x.histc(50),
    "multinomial": lambda x, _: x[:10000].multinomial(100),
    "mask": lambda x, _: x[x > 0.3],
    "scatter_add": lambda x, i: torch.zeros(1000, device="cuda").scatter_add_(0, i, x),
    "index_put": lambda x, i: torch.zeros(1000, device="cuda").index_put_((i,), x, accumulate=True),
    "randperm": lambda x, _: torch.randperm(len(x), device="cuda"),
    "any": lambda x, _: (x > 2).any(),
    "where": lambda x, _: torch.where(x > 0.5),
    "searchsorted": lambda x, _: torch.searchsorted(x.sort()[0], x),
    "isin": lambda _, i: torch.isin(i, i[:100]),
    "std": lambda x, _: x.std(),
    "logsumexp": lambda x, _: x.logsumexp(0),
    "cummax": lambda x, _: x.cummax(0),
    "interpolate": lambda x, _: functional.interpolate(
        x[:1000].reshape(1, 1, 10, 100), scale_factor=3, mode="bilinear"
    ),
}


@pytest.mark.parametrize("count", [1000, 100_000, 3_000_000])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, count: int) -> None:
    torch.manual_seed(0)
    numbers = torch.rand(count, device="cuda")
    OPERATORS[name](numbers, torch.randint(0, 1000, (count,), device="cuda"))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recurrent(kind: str, dropout: float) -> None:
    layer = getattr(nn, kind)(64, 128, 2, dropout=dropout, batch_first=True).cuda()
    layer(torch.randn(16, 50, 64, device="cuda"))[0].sum().backward()


@pytest.mark.gpumem(max_leak=0)
@pytest.mark.parametrize("time", [1, 2])
def test_no_leak(model: nn.Module, time: int) -> None:
    model(torch.randn(64, 512, device="cuda")).sum().backward()


KEPT: list[Tensor] = []


def test_leak() -> None:
    KEPT.append(torch.ones(1 << 20, device="cuda"))


def test_streams() -> None:
    side, x = torch.cuda.Stream(), torch.randn(1 << 20, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2
        x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    (y + x).sum().item()


def test_data_loader() -> None:
    loader = DataLoader(TensorDataset(torch.randn(256, 512)), batch_size=64, pin_memory=True)
    model = perceptron(512, 512).cuda()
    for (x,) in loader:
        model(x.cuda(non_blocking=True)).sum().backward()


def test_second_gradients() -> None:
    critic = perceptron(64, 256, 1, activation=nn.Tanh).cuda()
    x = torch.randn(128, 64, device="cuda", requires_grad=True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()


def test_gradients_of_samples() -> None:
    from torch.func import functional_call, grad, vmap

    model = perceptron(32, 64, 4).cuda()
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(0, 4, (16,), device="cuda")

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    vmap(grad(loss), (None, 0, 0))(dict(model.named_parameters()), x, y)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, y, p: functional.cross_entropy(x, y),
    "smoothed": lambda x, y, p: functional.cross_entropy(x, y, label_smoothing=0.1),
    "weighted": lambda x, y, p: functional.cross_entropy(x, y, weight=p[0]),
    "binary": lambda x, y, p: functional.binary_cross_entropy_with_logits(x, p),
    "kl_div": lambda x, y, p: functional.kl_div(x.log_softmax(-1), p, reduction="batchmean"),
    "huber": lambda x, y, p: functional.huber_loss(x, p),
    "nll": lambda x, y, p: functional.nll_loss(x.log_softmax(-1), y),
    "triplet": lambda x, y, p: functional.triplet_margin_loss(x, p, p.flip(0)),
    "cosine": lambda x, y, p: functional.cosine_embedding_loss(
        x, p, torch.ones(2048, device="cuda")
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    scores = torch.randn(2048, 1000, device="cuda", requires_grad=True)
    labels = torch.randint(0, 1000, (2048,), device="cuda")
    LOSSES[name](scores, labels, torch.rand(2048, 1000, device="cuda")).backward()


def eighths(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: a @ b,
    "mm bf16": lambda a, b: a.bfloat16() @ b.bfloat16(),
    "bmm": lambda a, b: torch.bmm(a.expand(4, 512, 256), b.expand(4, 256, 384)),
    "addmm": lambda a, b: torch.addmm(b[0], a, b),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "batched": lambda a, b: a.expand(3, 512, 256) @ b,
    "gelu": lambda a, b: torch._addmm_activation(b[0], a, b, use_gelu=True),
    "mv": lambda a, b: a @ b[:, 0],
    "dot": lambda a, b: torch.dot(b[0], b[1]),
    "outer": lambda a, b: torch.outer(b[0], b[1]),
    "int8": lambda a, b: torch._int_mm(
        *[torch.ones(64, 64, dtype=torch.int8, device="cuda") for _ in range(2)]
    ),
    "float8": lambda a, b: torch._scaled_mm(
        *(eighths(a), eighths(b.T.contiguous()).T),
        *[torch.ones((), device="cuda") for _ in range(2)],
        out_dtype=BF16,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    PRODUCTS[name](torch.randn(512, 256, device="cuda"), torch.randn(256, 384, device="cuda"))
