"""torchtitan's Llama under FSDP2 or FSDP1, with tensor parallelism where asked for, one rank.

Written anew from pytorch/torchtitan, its shapes and its order of operators, at

- 83c879f1 ("Used per-parameter FSDP", #165): Llama 2 7B, tokens folded into one dimension, logits
  in float32 from the model itself; for FSDP1 its parent, which wraps with ``FSDP``;
- 5940ddeb ("Makes FSDP reshard_after_forward configurable", #822): Llama 3 8B; the casts of the
  logits belong to the loss and the output dies before the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Sizes:
    """A model, its batch and what the source's version of the code does."""

    inner: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int
    positions: int
    """Rows of the table of rotations."""
    batch: int
    length: int
    folds: bool
    """Whether tokens are one dimension, and the model casts its logits itself."""
    width: int = 4096
    heads: int = 32
    layers: int = 32


LLAMA_2_7B = Sizes(11_008, 32, 32_000, 65_536, 8, 2048, folds=True)
LLAMA_3_8B = Sizes(14_336, 8, 128_256, 8192, 1, 8192, folds=False)


class Norm(nn.Module):
    """Root mean square norm in float32, cast back before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        output = self._norm(x.float()).type_as(x)
        return output * self.weight

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rotate(q: Tensor, k: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (batch, length, heads, size), rotated as complex numbers in float32."""
    complex_q = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    complex_k = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    rotations = rotations[: q.shape[1]].view(1, q.shape[1], 1, -1)
    rotated_q = torch.view_as_real(complex_q * rotations).flatten(3)
    rotated_k = torch.view_as_real(complex_k * rotations).flatten(3)
    return rotated_q.type_as(q), rotated_k.type_as(k)


class Attention(nn.Module):
    """Causal attention; keys and values are repeated for their heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.repeats = sizes.heads // sizes.groups
        self.folds = sizes.folds
        self.wq = nn.Linear(sizes.width, sizes.heads * self.size, bias=False)
        self.wk = nn.Linear(sizes.width, sizes.groups * self.size, bias=False)
        self.wv = nn.Linear(sizes.width, sizes.groups * self.size, bias=False)
        self.wo = nn.Linear(sizes.heads * self.size, sizes.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """The layer's output, in the shape of ``x``."""
        batch, length = x.shape[0], x.shape[1]
        if self.folds:
            batch, length = x.shape[0] // rotations.shape[0], rotations.shape[0]
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(batch, length, -1, self.size)
        xk = xk.view(batch, length, -1, self.size)
        xv = xv.view(batch, length, -1, self.size)
        xq, xk = rotate(xq, xk, rotations)
        keys = self._repeated(xk)
        values = self._repeated(xv)
        xq = xq.transpose(1, 2)
        xk = keys.transpose(1, 2)
        xv = values.transpose(1, 2)
        output = functional.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        output = output.view(batch * length, -1) if self.folds else output.view(batch, length, -1)
        projected: Tensor = self.wo(output)
        return projected

    def _repeated(self, x: Tensor) -> Tensor:
        if self.repeats == 1:
            return x
        batch, length, groups, size = x.shape
        wider = torch.unsqueeze(x, dim=3).expand(batch, length, groups, self.repeats, size)
        return wider.reshape(batch, length, groups * self.repeats, size)


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.w2 = nn.Linear(sizes.inner, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        output: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return output


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = norm(sizes.width)
        self.ffn_norm = norm(sizes.width)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """The layer's output."""
        h = x + self.attention(self.attention_norm(x), rotations)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Llama(nn.Module):
    """The language model."""

    rotations: Tensor

    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.register_buffer("rotations", self._rotations())
        self.layers = nn.ModuleList(Block(sizes, norm) for _ in range(sizes.layers))
        self.norm = norm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def _rotations(self) -> Tensor:
        size = self.sizes.width // self.sizes.heads
        frequencies = 1.0 / (10_000 ** (torch.arange(0, size, 2)[: size // 2].float() / size))
        angles = torch.outer(torch.arange(self.sizes.positions), frequencies).float()
        return torch.polar(torch.ones_like(angles), angles)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Values for what was made without any, in the source's order."""
        with torch.device("cuda"):
            self.rotations = self._rotations()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        h = self.tok_embeddings(tokens)
        rotations = self.rotations
        if self.sizes.folds:
            rotations = self.rotations[: tokens.shape[1]]
            h = h.view(-1, self.sizes.width)
        for layer in self.layers:
            h = layer(h, rotations)
        h = self.norm(h)
        if self.sizes.folds:
            h = h.view(tokens.shape[0], h.shape[0] // tokens.shape[0], self.sizes.width)
            logits: Tensor = self.output(h).float()
            return logits
        output: Tensor = self.output(h)
        return output


# Activation checkpointing.

_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _selective() -> Any:
    """Save the costly operators' outputs, but for every second product."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if operator in _SAVED:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    """A layer that recomputes all (``"full"``) or some (``"op"``) of its forward pass."""
    if mode == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return checkpoint_wrapper(block, context_fn=_selective, preserve_rng_state=False)


# Parallelism.


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism over the folded tokens, with a parallel loss."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(
                input_layouts=Shard(0),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),
            "norm": SequenceParallel(sequence_dim=0),
            "layers.0": PrepareModuleInput(
                input_layouts=(Replicate(), None),
                desired_input_layouts=(Shard(0), None),
                use_local_output=True,
            ),
        },
    )
    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(0)),
                "attention_norm": SequenceParallel(sequence_dim=0),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(0)),
                "feed_forward.w3": ColwiseParallel(),
                "ffn_norm": SequenceParallel(sequence_dim=0),
            },
        )


def shard(model: Llama, mesh: DeviceMesh, reshard: str) -> None:
    """FSDP2, a group for each layer; ``reshard`` is torchtitan's policy after the forward pass."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.layers):
        after = {"always": True, "never": False}.get(reshard, i < len(model.layers) - 1)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=after)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def chunked(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over eighths of the sequence, one after another."""
    total: Any = 0.0
    for some, targets in zip(logits.chunk(8, dim=1), labels.chunk(8, dim=1), strict=True):
        total += cross_entropy(some, targets)
    loss: Tensor = total / 8
    return loss


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in float32, which folded tokens' logits are already."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


# One rank.


@dataclass(frozen=True)
class Run:
    """How the model is trained."""

    sizes: Sizes
    checkpoints: str
    """``full``, or ``op`` for selective."""
    reshard: str = "default"
    tensor: int = 1
    """Ranks of a tensor-parallel group."""
    flat: bool = False
    """FSDP1."""
    norm: Callable[[int], nn.Module] = Norm
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy


def build(run: Run) -> nn.Module:
    """The model of this rank, sharded, with values."""
    with torch.device("meta"):
        model = Llama(run.sizes, run.norm)
    names = ("dp", "tp") if run.tensor > 1 else ("dp",)
    ranks = dist.get_world_size()
    shape = (ranks // run.tensor, run.tensor) if run.tensor > 1 else (ranks,)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    if run.tensor > 1:
        tensor_parallel(model, mesh["tp"])
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpointed(block, run.checkpoints)
    if run.flat:
        return _flattened(model)
    shard(model, mesh["dp"] if run.tensor > 1 else mesh, run.reshard)
    model.to_empty(device="cuda")
    model.init_weights()
    return model


def _flattened(model: Llama) -> nn.Module:
    """FSDP1 as the parent of #165 wraps: around the checkpoints."""
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "use_orig_params": True,
        "param_init_fn": lambda module: module.to_empty(device="cuda", recurse=False),
    }
    for i, block in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def train(run: Run, steps: int) -> list[tuple[int, int]]:
    """Highest active and reserved bytes while the model is made, and since then in each step."""
    model = build(run)
    peaks = [_peaks()]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    for _ in range(steps):
        tokens = torch.zeros(run.sizes.batch, run.sizes.length + 1, dtype=torch.long)
        inputs, labels = tokens[:, :-1].to("cuda"), tokens[:, 1:].to("cuda")
        optimizer.zero_grad()
        predicted = model(inputs)
        with loss_parallel() if run.tensor > 1 else nullcontext():
            loss = run.loss(predicted, labels)
            if not run.sizes.folds:
                # Earlier versions keep the logits until the next ones.
                del predicted
            loss.backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        loss.item()
        peaks.append(_peaks())
    return peaks


def _peaks() -> tuple[int, int]:
    """Highest active and reserved bytes since the last call."""
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
