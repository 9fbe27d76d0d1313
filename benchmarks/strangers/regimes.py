"""Ways to train and to run one small language model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strangers import MIXED, Program, listed

WORDS, WIDTH, LENGTH = 512, 128, 96


class Attention(nn.Module):
    """Causal self-attention of four heads."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform."""
        x = x + self.attention(self.first(x))
        made: torch.Tensor = x + self.perceptron(self.second(x))
        return made


class Model(nn.Module):
    """A language model of a few blocks."""

    def __init__(self, layers: int = 3, dropout: float = 0.0, keeps: str = "all") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.keeps = keeps

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(given) + self.places(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            if self.keeps == "all":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.keeps == "reentrant")
        made: torch.Tensor = self.head(self.norm(x))
        return made


def tokens(batch: int = 4) -> torch.Tensor:
    """Return words and the next ones."""
    return torch.randint(0, WORDS, (batch, LENGTH + 1)).cuda()


def loss_of(model: Any, given: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next words."""
    logits = model(given[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())


def step(model: Any, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> None:
    """Take a step."""
    optimizer.zero_grad(set_to_none=True)
    loss_of(model, given).backward()
    optimizer.step()


def trained(model: nn.Module, optimizer: Any = torch.optim.AdamW, **settings: Any) -> nn.Module:
    """Train a model for two steps."""
    model.cuda().train()
    chosen = optimizer(model.parameters(), lr=1e-3, **settings)
    for _ in range(2):
        step(model, chosen, tokens())
    return model


def plain_training() -> None:
    trained(Model())


def training_with_dropout() -> None:
    trained(Model(dropout=0.1))


def fused_adam() -> None:
    trained(Model(), torch.optim.AdamW, fused=True)


def loop_adam() -> None:
    trained(Model(), torch.optim.Adam, foreach=False)


def amsgrad() -> None:
    trained(Model(), torch.optim.Adam, amsgrad=True, weight_decay=0.01)


def momentum() -> None:
    trained(Model(), torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=1e-4)


def root_mean_squares() -> None:
    trained(Model(), torch.optim.RMSprop, centered=True, momentum=0.9)


def adafactor() -> None:
    trained(Model(), torch.optim.Adafactor)


def capturable_adam() -> None:
    trained(Model(), torch.optim.AdamW, capturable=True)


def accumulated_gradients() -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for _ in range(3):
            (loss_of(model, tokens(2)) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept_at_zero() -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, tokens()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()


def scaled_half_precision() -> None:
    model, scaler = Model().cuda(), torch.amp.GradScaler()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model, tokens())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def master_weights() -> None:
    model = Model().cuda()
    masters = [one.detach().clone().float() for one in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters)
    for _ in range(2):
        loss_of(model, tokens()).backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            slope: Any = one.grad
            master.grad, one.grad = slope.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)


def checkpointed() -> None:
    trained(Model(keeps="some"))


def checkpointed_with_dropout() -> None:
    trained(Model(dropout=0.1, keeps="some"))


def checkpointed_reentrantly() -> None:
    trained(Model(keeps="reentrant"))


def selectively_checkpointed() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    model = Model().cuda()
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    x = torch.randn(4, LENGTH, WIDTH, device="cuda", requires_grad=True)
    for block in model.blocks:
        x = checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(kept),
        )
    x.square().mean().backward()


def activations_on_host() -> None:
    model = Model().cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = loss_of(model, tokens())
    loss.backward()


def averaged_weights() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = Model().cuda()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer, tokens())
        mean.update_parameters(model)
    with torch.no_grad():
        mean(tokens()[:, :-1])


def optimizer_in_backward() -> None:
    model = Model().cuda()
    optimizers: dict[Any, Any] = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def apply(one: torch.Tensor) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(apply)
    for _ in range(2):
        loss_of(model, tokens()).backward()


def sharpness_aware() -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = tokens()
    loss_of(model, given).backward()
    parts: list[Any] = [one for one in model.parameters() if one.grad is not None]
    with torch.no_grad():
        norm = torch.stack([one.grad.norm() for one in parts]).norm()
        moved = [one.grad * (0.05 / (norm + 1e-12)) for one in parts]
        torch._foreach_add_(parts, moved)
    optimizer.zero_grad()
    loss_of(model, given).backward()
    with torch.no_grad():
        torch._foreach_sub_(parts, moved)
    optimizer.step()


def low_rank_adapters() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.down = nn.Linear(inner.in_features, 8, bias=False)
            self.up = nn.Linear(8, inner.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.inner(x) + 2.0 * self.up(self.down(x))
            return made

    model = Model().requires_grad_(False)
    blocks: Any = model.blocks
    for block in blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
    model.cuda()
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    for _ in range(2):
        step(model, optimizer, tokens())


def frozen_lower_layers() -> None:
    model = Model().cuda()
    for part in (model.words, model.places, *model.blocks[:2]):
        part.requires_grad_(False)
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    step(model, optimizer, tokens())


def loss_in_chunks() -> None:
    model = Model().cuda()
    given = tokens(8)
    hidden = model.words(given[:, :-1])
    for block in model.blocks:
        hidden = block(hidden)
    held = hidden.detach().requires_grad_()
    for part, wanted in zip(held.chunk(4), given[:, 1:].chunk(4), strict=True):
        F.cross_entropy(
            model.head(part).flatten(0, 1), wanted.flatten(), reduction="sum"
        ).backward()
    hidden.backward(held.grad)


def distillation() -> None:
    teacher, student = Model(4).cuda().eval().requires_grad_(False), Model(2).cuda()
    optimizer = torch.optim.AdamW(student.parameters())
    for _ in range(2):
        given = tokens()[:, :-1]
        with torch.no_grad():
            wanted = F.softmax(teacher(given) / 2.0, dim=-1)
        loss = F.kl_div(F.log_softmax(student(given) / 2.0, dim=-1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        (4.0 * loss).backward()
        optimizer.step()


def inference() -> None:
    model = Model().cuda().eval()
    with torch.inference_mode():
        for _ in range(2):
            model(tokens()[:, :-1]).argmax(-1)


def decoding_with_a_cache() -> None:
    layers = [Attention().cuda().eval() for _ in range(2)]
    keys = torch.zeros(2, 2, 4, 64, WIDTH // 4, device="cuda")
    values = torch.zeros_like(keys)
    x = torch.randn(2, 1, WIDTH, device="cuda")
    with torch.no_grad():
        for place in range(6):
            for index, layer in enumerate(layers):
                q, k, v = (
                    part.unflatten(-1, (4, -1)).transpose(1, 2)
                    for part in layer.qkv(x).chunk(3, dim=-1)
                )
                keys[index, :, :, place : place + 1] = k
                values[index, :, :, place : place + 1] = v
                held = slice(0, place + 1)
                mixed = F.scaled_dot_product_attention(
                    q.to(keys.dtype), keys[index, :, :, held], values[index, :, :, held]
                )
                x = x + layer.out(mixed.transpose(1, 2).flatten(2))


def sampling_words() -> None:
    model = Model().cuda().eval()
    given = tokens(2)[:, :16]
    with torch.no_grad():
        for _ in range(4):
            logits = model(given)[:, -1] / 0.8
            best, _ = torch.topk(logits, 40)
            logits[logits < best[:, -1:]] = -torch.inf
            ordered, order = torch.sort(logits, descending=True)
            left = F.softmax(ordered, dim=-1).cumsum(-1) > 0.9
            left = left.roll(1, -1).index_fill(1, torch.zeros(1, dtype=torch.int64).cuda(), 0)
            logits = logits.masked_fill(left.scatter(1, order, left), -torch.inf)
            following = torch.multinomial(F.softmax(logits, dim=-1), 1)
            given = torch.cat([given, following], 1)


def beam_search() -> None:
    model = Model().cuda().eval()
    beams, scores = tokens(4)[:, :8], torch.zeros(4, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            told = F.log_softmax(model(beams)[:, -1], dim=-1) + scores[:, None]
            scores, best = told.flatten().topk(4)
            rows = best.div(WORDS, rounding_mode="floor")
            beams = torch.cat([beams.index_select(0, rows), (best % WORDS)[:, None]], 1)


def batches_from_another_stream() -> None:
    model, side = Model().cuda(), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters())
    held = [torch.randint(0, WORDS, (4, LENGTH + 1)).pin_memory() for _ in range(3)]
    with torch.cuda.stream(side):
        following = held[0].to("cuda", non_blocking=True)
    for given in held[1:]:
        torch.cuda.current_stream().wait_stream(side)
        now = following
        now.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            following = given.to("cuda", non_blocking=True)
        step(model, optimizer, now)
        torch.cuda.synchronize()


def captured_inference() -> Any:
    model, given = Model().cuda().eval(), tokens()[:, :-1].contiguous()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(given)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            result = model(given)
    graph.replay()
    return graph, result


def captured_training() -> Any:
    model, given = Model().cuda(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(model, optimizer, given)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss_of(model, given).backward()
        optimizer.step()
    graph.replay()
    return graph


def evaluated_between_steps() -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.zeros((), device="cuda")
    for _ in range(2):
        step(model, optimizer, tokens())
        model.eval()
        with torch.no_grad():
            total += loss_of(model, tokens(8)).detach()
        model.train()


def saved_and_loaded() -> None:
    model = trained(Model())
    state = {name: one.cpu() for name, one in model.state_dict().items()}
    other = Model().cuda()
    other.load_state_dict(state)
    held = copy.deepcopy(other)
    trained(held)


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    yield from listed(
        plain_training, training_with_dropout, fused_adam, loop_adam, amsgrad, momentum,
        root_mean_squares, adafactor, accumulated_gradients, gradients_kept_at_zero, checkpointed,
        checkpointed_with_dropout, loss_in_chunks, distillation, inference, decoding_with_a_cache,
        sampling_words, low_rank_adapters, averaged_weights, captured_inference,
    )  # fmt: skip
    yield from listed(
        capturable_adam, checkpointed_reentrantly, selectively_checkpointed, activations_on_host,
        optimizer_in_backward, sharpness_aware, frozen_lower_layers, beam_search,
        batches_from_another_stream, captured_training, evaluated_between_steps, saved_and_loaded,
        ways=MIXED,
    )  # fmt: skip
    yield from listed(scaled_half_precision, master_weights, ways=("f32",))
