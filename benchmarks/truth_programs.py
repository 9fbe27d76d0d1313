"""Small programs in which rules of the simulated device meet torch's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16


def linear_under_autocast() -> Any:
    """Bias, weight and input are cast in this order."""
    layer, given = nn.Linear(512, 1024).cuda(), torch.randn(64, 512, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        return layer(given)


def perceptron_under_autocast() -> Any:
    """A training step of two layers under autocast."""
    net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512))
    net.cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        with torch.autocast("cuda", dtype=BF16):
            loss = net(torch.randn(64, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def encoder_under_autocast() -> Any:
    """A training step of two encoder layers under autocast, with a scaler."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, device="cuda")
    net = nn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler()
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(torch.randn(4, 128, 256, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def convolutions_under_autocast() -> Any:
    """A training step of convolutions under autocast."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    net.cuda()
    with torch.backends.cudnn.flags(enabled=False), torch.autocast("cuda", dtype=BF16):
        loss = net(torch.randn(4, 3, 32, 32, device="cuda")).square().mean()
        loss.backward()


def flash_attention_with_dropout() -> Any:
    """The state of the generator is taken twice."""
    given = torch.randn(2, 8, 256, 64, device="cuda", dtype=BF16, requires_grad=True)
    F.scaled_dot_product_attention(given, given, given, dropout_p=0.1).sum().backward()


def attention_by_operators() -> Any:
    """The weights of the math path are cast back before they meet the values."""
    given = torch.randn(2, 8, 512, 64, device="cuda", dtype=BF16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(given, given, given).sum().backward()


def attention_while_captured() -> Any:
    """Efficient attention in a graph keeps its generator's state on the device."""
    given = torch.randn(2, 8, 256, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = F.scaled_dot_product_attention(given, given, given)
    return graph, result


def decoding_attention() -> Any:
    """One query and many keys: flash attention splits the keys."""
    query = torch.randn(1, 8, 1, 128, device="cuda", dtype=BF16)
    key = torch.randn(1, 8, 4096, 128, device="cuda", dtype=BF16)
    with torch.no_grad():
        return F.scaled_dot_product_attention(query, key, key)


def gradient_penalty() -> Any:
    """Nodes that a backward pass makes are numbered by the device's thread."""
    net = nn.Sequential(nn.Linear(256, 512), nn.Softplus(), nn.Linear(512, 512), nn.Softplus())
    net.append(nn.Linear(512, 1)).cuda()
    given = torch.randn(128, 256, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(net(given).sum(), given, create_graph=True)
    gradient.norm(2, 1).mean().backward()


def adversarial_pair() -> Any:
    """A generator and a critic with a gradient penalty, two steps."""
    made = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    critic = nn.Sequential(nn.Linear(128, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).cuda()
    first, second = (torch.optim.Adam(net.parameters()) for net in (made, critic))
    for _ in range(2):
        real = torch.randn(32, 128, device="cuda")
        fake = made(torch.randn(32, 64, device="cuda"))
        between = (real + torch.rand(32, 1, device="cuda") * (fake.detach() - real)).detach()
        between.requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake.detach()).mean() - critic(real).mean()
        (loss + 10 * (slope.norm(2, 1) - 1).square().mean()).backward()
        second.step()
        second.zero_grad()
        (-critic(fake).mean()).backward()
        first.step()
        first.zero_grad()


def learning_to_learn() -> Any:
    """Two inner steps whose gradients are differentiated (MAML)."""
    weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2)]
    given = torch.randn(32, 64, device="cuda")

    def loss(ones: list[torch.Tensor]) -> torch.Tensor:
        hidden = given
        for one in ones:
            hidden = torch.tanh(hidden @ one)
        return hidden.square().mean()

    fast = weights
    for _ in range(2):
        slopes = torch.autograd.grad(loss(fast), fast, create_graph=True)
        fast = [one - 0.1 * slope for one, slope in zip(fast, slopes, strict=True)]
    loss(fast).backward()


def hessian() -> Any:
    """Second derivatives of a small function, by torch.func and by autograd."""
    given = torch.randn(16, device="cuda")

    def value(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.square()).sum()

    first = torch.func.hessian(value)(given)
    second = torch.autograd.functional.hessian(value, given)
    third = torch.func.jvp(torch.tanh, (given,), (given,))
    return first, second, third


def attention_module_in_inference() -> Any:
    """The fused path of the module, with and without weights."""
    layer = nn.MultiheadAttention(512, 8, batch_first=True).cuda().eval()
    given = torch.randn(4, 256, 512, device="cuda")
    with torch.no_grad():
        layer(given, given, given)
        layer(given, given, given, need_weights=False)


def encoder_in_inference() -> Any:
    """The encoder's fused path, with and without padding."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).cuda().eval()
    given = torch.randn(4, 128, 256, device="cuda")
    with torch.no_grad():
        return net(given)


def bicubic_resize() -> Any:
    """An expanded gradient is made contiguous."""
    given = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    F.interpolate(given, scale_factor=2, mode="bicubic").sum().backward()


def nearest_exact_resize() -> Any:
    """An expanded gradient is made contiguous."""
    given = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    F.interpolate(given, scale_factor=2, mode="nearest-exact").sum().backward()


def antialiased_resize() -> Any:
    """An expanded gradient is made contiguous."""
    given = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    F.interpolate(given, scale_factor=0.5, mode="bilinear", antialias=True).sum().backward()


def adaptive_max_pool() -> Any:
    """An expanded gradient is made contiguous."""
    given = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    F.adaptive_max_pool2d(given, 8).sum().backward()


def unfolded() -> Any:
    """Columns of an image, and back."""
    given = torch.randn(4, 16, 64, 64, device="cuda", requires_grad=True)
    columns = F.unfold(given, 3, padding=1)
    F.fold(columns, (64, 64), 3, padding=1).sum().backward()


def patches_without_cudnn() -> Any:
    """The bias gradient of a convolution sums a contiguous gradient."""
    layer = nn.Conv2d(3, 384, 16, 16).cuda().to(BF16)
    given = torch.randn(16, 3, 224, 224, device="cuda", dtype=BF16)
    with torch.backends.cudnn.flags(enabled=False):
        made = layer(given).flatten(2).transpose(1, 2).contiguous()
        made.float().square().mean().backward()


def recurrent_without_cudnn() -> Any:
    """An LSTM of fused cells."""
    with torch.backends.cudnn.flags(enabled=False):
        layer = nn.LSTM(64, 128, 2, batch_first=True).cuda()
        layer(torch.randn(8, 16, 64, device="cuda"))[0].sum().backward()


def broadcast_index() -> Any:
    """Indices that are broadcast against each other."""
    given, index = torch.randn(256, 512, device="cuda"), torch.arange(100).cuda()
    return given[index[:, None], index]


def expanded_positions() -> Any:
    """BERT's embeddings: positions are expanded over the batch."""
    table, types = nn.Embedding(512, 256).cuda(), nn.Embedding(2, 256).cuda()
    positions = torch.arange(128).expand(1, -1).cuda().expand(8, 128)
    kinds = torch.zeros(1, 128, dtype=torch.int64).cuda().expand(8, 128)
    (table(positions) + types(kinds)).sum().backward()


def half_softmax() -> Any:
    """Softmax of float16 to float32 is one kernel; of bfloat16 a copy goes before."""
    for dtype in (torch.float16, BF16):
        for function in (F.softmax, F.log_softmax, F.softmin):
            given = torch.randn(256, 1024, device="cuda").to(dtype).requires_grad_()
            function(given, dim=-1, dtype=torch.float32).sum().backward()


def weighted_losses() -> Any:
    """Losses with weights, smoothing and positive weights."""
    scores = torch.randn(256, 100, device="cuda", requires_grad=True)
    marks = torch.rand(256, 100, device="cuda")
    classes = torch.randint(100, (256,)).cuda()
    weight = torch.rand(100, device="cuda")
    F.binary_cross_entropy_with_logits(scores, marks, pos_weight=weight).backward()
    F.binary_cross_entropy_with_logits(scores, marks, weight=weight).backward()
    F.cross_entropy(scores, classes, weight=weight).backward()
    F.cross_entropy(scores, classes, weight=weight, label_smoothing=0.1).backward()
    F.cross_entropy(scores, marks, label_smoothing=0.1).backward()


def standardized() -> Any:
    """Gradients of mean and deviation together."""
    given = torch.randn(64, 1000, device="cuda", requires_grad=True)
    deviation, mean = torch.std_mean(given, 1, keepdim=True)
    ((given - mean) / deviation).sum().backward()
    variance, mean = torch.var_mean(given, 1, keepdim=True)
    ((given - mean) * torch.rsqrt(variance + 1e-5)).square().mean().backward()


def contrastive() -> Any:
    """Normalized embeddings, their similarities, and a temperature that learns."""
    first, second = (torch.randn(128, 256, device="cuda", requires_grad=True) for _ in range(2))
    scale = torch.tensor(0.0).cuda().requires_grad_()
    logits = F.normalize(first) @ F.normalize(second).T * scale.exp().clamp(max=100)
    targets = torch.arange(128).cuda()
    (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)).backward()
    F.cosine_similarity(first, second).sum().backward()


def checkpointed_under_autocast() -> Any:
    """Checkpointed blocks under autocast."""
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        for _ in range(3)
    ).cuda()
    hidden = torch.randn(8, 64, 256, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        for block in blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.square().mean()
    loss.backward()


def sorted_scores() -> Any:
    """Sorting, ranking and scanning many numbers."""
    given = torch.randn(8000, device="cuda")
    torch.msort(given), torch.argsort(given), torch.cumsum(given, 0), torch.topk(given, 100)
    return torch.randperm(5000, device="cuda")


def gradients_of_functions() -> Any:
    """Attention, dropout and norms within torch.func take CUDA's kernels."""
    weight = torch.randn(64, device="cuda", dtype=BF16)

    def loss(x: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return F.dropout(F.rms_norm(mixed, (64,), weight), 0.1).softmax(-1).square().sum()

    given = torch.randn(3, 2, 4, 32, 64, device="cuda", dtype=BF16)
    torch.func.grad(loss)(given[0])
    return torch.func.vmap(loss, randomness="different")(given)


def tangents() -> Any:
    """Sums and products of tangents that are zero take no memory."""
    weight, given = torch.randn(64, 64, device="cuda"), torch.randn(64, device="cuda")

    def value(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(weight @ x) * given).sum()

    torch.func.jacfwd(lambda x: torch.tanh(weight @ x))(given)
    return torch.func.jvp(torch.func.grad(value), (given,), (given,))


def tangents_of_duals() -> Any:
    """Tangents of layers, outside of torch.func."""
    net = nn.Sequential(nn.Linear(64, 256), nn.GLU(), nn.Linear(128, 64)).cuda()
    net.requires_grad_(False)
    given = torch.randn(32, 64, device="cuda")
    with forward_ad.dual_level():
        scores = net(forward_ad.make_dual(given, torch.ones_like(given)))
        weight = forward_ad.make_dual(net[0].weight, given.new_ones(256, 64))
        other = F.linear(scores, weight).log_softmax(-1)
        return forward_ad.unpack_dual(scores.softmax(-1)), forward_ad.unpack_dual(other)


def composites_in_inference() -> Any:
    """Autocast casts the parts of operators that it has no kernel for."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 4, padding="same"), nn.Flatten()
    ).cuda()
    with torch.inference_mode(), torch.autocast("cuda", BF16):
        rows = net(torch.randn(4, 3, 9, 9, device="cuda"))
        loss = F.cross_entropy(rows, torch.zeros(4, dtype=torch.long, device="cuda"))
        return loss, torch.cov(rows), torch.linalg.matrix_power(rows[:, :4], 3)


def packed_sequences() -> Any:
    """Steps of padded sequences are copied, then joined."""
    net = nn.LSTM(64, 64, batch_first=True).cuda()
    given = torch.randn(4, 50, 64, device="cuda", requires_grad=True)
    pack = nn.utils.rnn.pack_padded_sequence
    net(pack(given, torch.tensor([50, 40, 25, 5]), batch_first=True))[0].data.sum().backward()


def copied_and_averaged() -> Any:
    """Deep copies of parameters, buffers and views."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    averaged = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    net(torch.randn(4, 3, 16, 16, device="cuda")).sum().backward()
    averaged.update_parameters(net)
    cache = torch.zeros(8, 1024, device="cuda")
    return averaged, copy.deepcopy([cache[:2], cache[2:]])


def penalty_through_a_norm() -> Any:
    """The second gradient of root mean square norm."""
    net = nn.Sequential(nn.Linear(64, 256), nn.RMSNorm(256), nn.SiLU(), nn.Linear(256, 1)).cuda()
    given = torch.randn(32, 64, device="cuda", requires_grad=True)
    (slope,) = torch.autograd.grad(net(given).sum(), given, create_graph=True)
    slope.norm(dim=1).mean().backward()


def captured_with_dropout() -> Any:
    """A capture's random state comes behind the results that need it."""
    net = nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1)).cuda()
    given, graph = torch.randn(64, 128, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad():
        net(given)
        with torch.cuda.graph(graph):
            result = net(given)
    return graph, result


_PROGRAMS: tuple[Callable[[], Any], ...] = (
    linear_under_autocast,
    perceptron_under_autocast,
    encoder_under_autocast,
    convolutions_under_autocast,
    flash_attention_with_dropout,
    attention_by_operators,
    attention_while_captured,
    decoding_attention,
    gradient_penalty,
    adversarial_pair,
    learning_to_learn,
    hessian,
    attention_module_in_inference,
    encoder_in_inference,
    bicubic_resize,
    nearest_exact_resize,
    antialiased_resize,
    adaptive_max_pool,
    unfolded,
    patches_without_cudnn,
    recurrent_without_cudnn,
    broadcast_index,
    expanded_positions,
    half_softmax,
    weighted_losses,
    standardized,
    contrastive,
    checkpointed_under_autocast,
    sorted_scores,
    gradients_of_functions,
    tangents,
    tangents_of_duals,
    composites_in_inference,
    packed_sequences,
    copied_and_averaged,
    penalty_through_a_norm,
    captured_with_dropout,
)


def programs() -> dict[str, Callable[[], Any]]:
    """Return the programs by name."""
    return {run.__name__: run for run in _PROGRAMS}
