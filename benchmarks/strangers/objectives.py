"""Objectives and gradients that are not the usual ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strangers import MIXED, Program, listed


def net(*widths: int) -> nn.Sequential:
    """Return a perceptron on the GPU."""
    layers: list[nn.Module] = []
    for given, made in pairwise(widths):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).cuda()


def noise(*shape: int) -> torch.Tensor:
    """Return noise on the GPU."""
    return torch.randn(*shape, device="cuda")


def variational_autoencoder() -> None:
    encoder, decoder = net(784, 256, 32), net(16, 256, 784)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(2):
        given = noise(64, 784).sigmoid()
        mean, spread = encoder(given).chunk(2, -1)
        code = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        lost = F.mse_loss(decoder(code).sigmoid(), given, reduction="sum")
        lost = lost - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()


def quantized_autoencoder() -> None:
    encoder, decoder, codes = net(64, 128, 32), net(32, 128, 64), nn.Embedding(256, 32).cuda()
    parts = [*encoder.parameters(), *decoder.parameters(), *codes.parameters()]
    optimizer = torch.optim.AdamW(parts)
    for _ in range(2):
        given = noise(128, 64)
        code = encoder(given)
        far = (
            code.pow(2).sum(1, keepdim=True)
            + codes.weight.pow(2).sum(1)
            - 2 * code @ codes.weight.T
        )
        nearest = codes(far.argmin(1))
        lost = F.mse_loss(nearest, code.detach()) + 0.25 * F.mse_loss(code, nearest.detach())
        lost = lost + F.mse_loss(decoder(code + (nearest - code).detach()), given)
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()


def adversaries() -> None:
    maker, critic = net(32, 128, 64), net(64, 128, 1)
    first, second = (
        torch.optim.Adam(one.parameters(), betas=(0.5, 0.9)) for one in (maker, critic)
    )
    for _ in range(2):
        fake = maker(noise(64, 32))
        found = critic(torch.cat([noise(64, 64).to(fake.dtype), fake.detach()]))
        wanted = torch.cat([torch.ones_like(found[:64]), torch.zeros_like(found[64:])])
        second.zero_grad()
        F.binary_cross_entropy_with_logits(found, wanted).backward()
        second.step()
        found = critic(fake)
        first.zero_grad()
        F.binary_cross_entropy_with_logits(found, torch.ones_like(found)).backward()
        first.step()


def queue_of_negatives() -> None:
    query, key = net(64, 128, 32), net(64, 128, 32)
    key.load_state_dict(query.state_dict())
    key.requires_grad_(False)
    queue = F.normalize(noise(32, 512), dim=0)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            wanted = F.normalize(key(noise(32, 64)), dim=1)
        found = F.normalize(query(noise(32, 64)), dim=1)
        near = torch.einsum("nc,nc->n", found, wanted).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", found, queue.clone().detach().to(found.dtype))
        scores = torch.cat([near, far], 1) / 0.07
        optimizer.zero_grad()
        F.cross_entropy(scores, torch.zeros(32, dtype=torch.int64, device="cuda")).backward()
        optimizer.step()
        queue = torch.cat([queue[:, 32:], wanted.T.to(queue.dtype)], 1)


def pictures_and_texts() -> None:
    first, second = net(128, 256, 64), net(96, 256, 64)
    scale = nn.Parameter(torch.tensor(2.6).cuda())
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), scale])
    for _ in range(2):
        one, other = (
            F.normalize(first(noise(64, 128)), dim=-1),
            F.normalize(second(noise(64, 96)), dim=-1),
        )
        scores = scale.exp() * one @ other.T
        wanted = torch.arange(64, device="cuda")
        lost = (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.T, wanted)) / 2
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, 4.6)


def sigmoid_pairs() -> None:
    first = net(128, 256, 64)
    scores = (
        F.normalize(first(noise(64, 128)), dim=-1) @ F.normalize(first(noise(64, 128)), dim=-1).T
    )
    signs = 2 * torch.eye(64, device="cuda") - 1
    (-F.logsigmoid(signs * (scores * 10 - 10)).sum() / 64).backward()


def triplets() -> None:
    model = net(64, 128, 32)
    anchor, near, far = (model(noise(64, 64)) for _ in range(3))
    lost = F.triplet_margin_loss(anchor, near, far, margin=0.3)
    lost = lost + F.cosine_embedding_loss(anchor, near, torch.ones(64, device="cuda"))
    lost = lost + F.margin_ranking_loss(anchor[:, 0], far[:, 0], torch.ones(64, device="cuda"))
    lost.backward()


def decorrelation() -> None:
    model = net(64, 128, 128)
    one, other = model(noise(64, 64)), model(noise(64, 64))
    one, other = ((x - x.mean(0)) / (x.std(0) + 1e-5) for x in (one, other))
    both = one.T @ other / 64
    on = torch.diagonal(both).add(-1).pow(2).sum()
    off = both.flatten()[:-1].view(127, 129)[:, 1:].pow(2).sum()
    (on + 0.005 * off).backward()


def clipped_policy() -> None:
    policy, value = net(24, 128, 6), net(24, 128, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], eps=1e-5)
    states = noise(256, 24)
    with torch.no_grad():
        chances = torch.distributions.Categorical(logits=policy(states), validate_args=False)
        actions = chances.sample()
        before = chances.log_prob(actions)
        gains = noise(256)
    for part in torch.randperm(256).cuda().chunk(2):
        now = torch.distributions.Categorical(logits=policy(states[part]), validate_args=False)
        ratio = (now.log_prob(actions[part]) - before[part]).exp()
        gain = gains[part]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        lost = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        lost = lost + 0.5 * F.mse_loss(value(states[part]).view(-1).to(gain.dtype), gain)
        lost = lost - 0.01 * now.entropy().mean()
        optimizer.zero_grad()
        lost.backward()
        nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
        optimizer.step()


def q_learning() -> None:
    model, target = net(8, 128, 4), net(8, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for _ in range(2):
        actions = torch.randint(0, 4, (128, 1)).cuda()
        now = model(noise(128, 8)).gather(1, actions)
        with torch.no_grad():
            later = target(noise(128, 8)).max(1).values
        wanted = (later * 0.99) + noise(128).to(later.dtype)
        optimizer.zero_grad()
        F.smooth_l1_loss(now, wanted.unsqueeze(1)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()


def preferences() -> None:
    model, held = net(64, 128, 256), net(64, 128, 256)

    def told(one: nn.Module, given: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.gather(one(given).log_softmax(-1), 2, words.unsqueeze(2)).squeeze(2).sum(-1)

    good, bad = noise(8, 32, 64), noise(8, 32, 64)
    words = torch.randint(0, 256, (8, 32)).cuda()
    with torch.no_grad():
        before = told(held, good, words) - told(held, bad, words)
    now = told(model, good, words) - told(model, bad, words)
    (-F.logsigmoid(0.1 * (now - before)).mean()).backward()


def experts() -> None:
    gate, layers = net(64, 8), nn.ModuleList(net(64, 256, 64) for _ in range(8))
    optimizer = torch.optim.AdamW([*gate.parameters(), *layers.parameters()])
    for _ in range(2):
        given = noise(256, 64)
        chances = F.softmax(gate(given), dim=-1)
        weights, picks = chances.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros(256, 64, device="cuda", dtype=weights.dtype)
        for index, layer in enumerate(layers):  # every row goes through every expert
            share = (weights * (picks == index)).sum(-1, keepdim=True)
            result = result + share * layer(given)
        load = F.one_hot(picks, 8).sum(1).to(chances.dtype).mean(0)
        lost = result.square().mean() + 0.01 * 8 * (load * chances.mean(0)).sum()
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()


def experts_in_a_batch() -> None:
    gate = net(64, 8)
    up, down = (nn.Parameter(noise(8, *shape) * 0.05) for shape in ((64, 256), (256, 64)))
    given = noise(256, 64)
    picks = gate(given).softmax(-1).topk(1)
    order = picks.indices.flatten().argsort()
    seats = given[order].view(8, 32, 64)
    made = torch.bmm(F.silu(torch.bmm(seats, up)), down).view(256, 64)
    result = torch.zeros_like(made).index_copy(0, order, made) * picks.values.to(made.dtype)
    result.square().mean().backward()


def gradient_penalties() -> None:
    critic = net(64, 128, 1)
    real, fake = noise(32, 64), noise(32, 64)
    part = torch.rand(32, 1, device="cuda")
    between = (part * real + (1 - part) * fake).requires_grad_()
    found = critic(between)
    (slope,) = torch.autograd.grad(found, between, torch.ones_like(found), create_graph=True)
    lost = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
    lost.backward()


def equation() -> None:
    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    model = nn.Sequential(
        nn.Linear(2, 64), Sine(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).cuda()
    x, t = (noise(256, 1).requires_grad_() for _ in range(2))
    u = model(torch.cat([x, t], 1))
    ones = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
    (u_t + u * u_x - 0.003 * u_xx).square().mean().backward()


def learned_inner_steps() -> None:
    model = net(16, 64, 1)
    optimizer = torch.optim.Adam(model.parameters())
    lost = torch.zeros((), device="cuda")
    for _ in range(3):
        fast: dict[str, Any] = dict(model.named_parameters())
        given, wanted = noise(16, 16), noise(16, 1)
        for _ in range(2):
            inner = F.mse_loss(torch.func.functional_call(model, fast, given), wanted)
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {
                name: one - 0.01 * slope
                for (name, one), slope in zip(fast.items(), slopes, strict=True)
            }
        lost = lost + F.mse_loss(torch.func.functional_call(model, fast, given), wanted)
    optimizer.zero_grad()
    lost.backward()
    optimizer.step()


def gradients_of_samples() -> None:
    model = net(32, 64, 10)
    parts = {name: one.detach() for name, one in model.named_parameters()}

    def lost(held: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, held, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(lost), (None, 0, 0))
    found = each(parts, noise(16, 32), torch.randint(0, 10, (16,)).cuda())
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)
    for one in found.values():
        torch.einsum("i,i...->...", (1 / norms.clamp(min=1)).to(one.dtype), one)


def products_with_the_hessian() -> None:
    model = net(32, 64, 1)
    parts = tuple(model.parameters())
    lost = model(noise(64, 32)).square().mean()
    slopes = torch.autograd.grad(lost, parts, create_graph=True)
    for _ in range(2):
        signs = [torch.randint_like(one, 0, 2) * 2 - 1 for one in parts]
        found = torch.autograd.grad(slopes, parts, signs, retain_graph=True)
        torch.stack([(one * sign).sum() for one, sign in zip(found, signs, strict=True)]).sum()


def ensemble() -> None:
    from torch.func import functional_call, stack_module_state, vmap

    models = [net(32, 64, 10) for _ in range(4)]
    parts, buffers = stack_module_state(models)
    given = noise(16, 32)
    found = vmap(lambda p, b: functional_call(models[0], (p, b), given))(parts, buffers)
    found.square().mean().backward()


def spectrally_normed() -> None:
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.LeakyReLU(0.1), layers[1]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.relu(1 - model(noise(32, 64))).mean().backward()
        optimizer.step()


def style() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 32, 3)
    ).cuda()
    model.requires_grad_(False)
    picture = noise(1, 3, 32, 32).requires_grad_()
    optimizer = torch.optim.Adam([picture])
    for _ in range(2):
        flat = model(picture).flatten(2)
        likeness = flat @ flat.transpose(1, 2) / flat.shape[-1]
        change = picture[..., 1:] - picture[..., :-1]
        optimizer.zero_grad()
        (F.mse_loss(likeness, torch.zeros_like(likeness)) + change.abs().mean()).backward()
        optimizer.step()


def quantization_aware() -> None:
    model = net(64, 128, 64)
    for _ in range(2):
        x = noise(32, 64)
        for layer in model:
            if isinstance(layer, nn.Linear):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                whole = (layer.weight / scale).round().clamp(-128, 127) * scale
                x = F.linear(x, layer.weight + (whole - layer.weight).detach(), layer.bias)
            else:
                x = layer(x)
        x.square().mean().backward()


def pruned() -> None:
    from torch.nn.utils import prune

    model = net(64, 128, 64)
    for layer in model:
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=0.3)
    model(noise(32, 64)).square().mean().backward()


def long_context() -> None:
    q, k, v = (noise(1, 4, 4096, 64).bfloat16().requires_grad_() for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def sliding_window() -> None:
    q, k, v = (noise(1, 4, 1024, 64).requires_grad_() for _ in range(3))
    places = torch.arange(1024, device="cuda")
    apart = places[:, None] - places[None]
    mask = (apart >= 0) & (apart < 128)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()


def linear_biases() -> None:
    q, k, v = (noise(2, 4, 256, 32).requires_grad_() for _ in range(3))
    places = torch.arange(256, device="cuda")
    slopes = 2.0 ** -torch.arange(1, 5, device="cuda")
    bias = (places[None] - places[:, None]).abs().neg()[None] * slopes[:, None, None]
    scores = (q @ k.transpose(-1, -2)) / 32**0.5 + bias
    scores = scores.masked_fill(torch.ones(256, 256, dtype=torch.bool).cuda().triu(1), -torch.inf)
    (F.dropout(scores.softmax(-1), 0.1) @ v).sum().backward()


def rotated_places() -> None:
    q, k, v = (noise(2, 4, 256, 32).requires_grad_() for _ in range(3))
    rates = 1.0 / (10000 ** (torch.arange(0, 32, 2, device="cuda").float() / 32))
    angles = torch.outer(torch.arange(256, device="cuda").float(), rates)
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, one], -1) * sin

    F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True).sum().backward()


def states_in_a_scan() -> None:
    x, gate = noise(4, 128, 64).requires_grad_(), noise(4, 128, 64).requires_grad_()
    kept = F.logsigmoid(gate).cumsum(1)
    made = torch.exp(kept) * torch.cumsum(x * torch.exp(-kept), 1)
    torch.logcumsumexp(made, 1).mean().backward()


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    yield from listed(
        variational_autoencoder, quantized_autoencoder, adversaries, queue_of_negatives,
        pictures_and_texts, sigmoid_pairs, triplets, decorrelation, clipped_policy, q_learning,
        preferences, experts, experts_in_a_batch, gradient_penalties, ensemble, linear_biases,
        rotated_places, sliding_window, quantization_aware, states_in_a_scan,
    )  # fmt: skip
    yield from listed(
        equation, learned_inner_steps, gradients_of_samples, products_with_the_hessian,
        spectrally_normed, style, pruned, ways=MIXED,
    )  # fmt: skip
    yield from listed(long_context, ways=("f32",))
