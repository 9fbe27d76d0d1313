"""Events of a running test that memory depends on, recorded as evidence for causes.

Some libraries keep workspaces, masks and histories on the device until the process ends; these are
no leak of a test. Source: Transformer Engine 2.8, pytorch/module/base.py (``get_workspace``),
pytorch/fp8.py (``FP8GlobalStateManager``) and pytorch/attention/dot_product_attention/utils.py and
softmax.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pytest_gpumem.attribution.composition import general_path
from pytest_gpumem.measurement.carried import Carried
from pytest_gpumem.measurement.contents import states_of
from pytest_gpumem.measurement.recorded import Recorder
from pytest_gpumem.values.errors import SimulationError

MOST_NAMES = 20
"""The most modules that are named of each kind. Baselines store them; a sentence names three."""
MOST_LARGEST = 8
"""The number of a model's parameters whose shapes are kept: enough for the weights of one
transformer block, as numbered blocks share a name, with embedding and head."""

_SHARDING = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of torch that show that a module's parameters are sharded."""

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that some fused attention kernel supports: ``check_tensor_dtype`` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
_BFLOAT16_SINCE = 8, 0
"""The lowest compute capability with bfloat16 in the memory-efficient kernel."""
_ALIGNED_HEAD = 8
"""Elements of which a head's size has to be a multiple in half precision
(``check_head_dim_size_*``)."""


class Facts:
    """The facts of one run of a test's body."""

    def __init__(self, recorder: Recorder) -> None:
        self._grad = {"on": 0, "off": 0}
        self._graphs = self._most_graphs = 0
        self._retained = self._kept_zeros = 0
        self._recomputed: dict[str, None] = {}
        self._layouts: dict[str, str] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._inputs: list[tuple[int, ...]] = []
        self._optimizers: dict[str, dict[str, Any]] = {}
        self._attention: dict[str, int] = {}
        self._unfused: dict[str, None] = {}
        self.failed_unfused = ""
        """The reason why the attention in which memory ran out used no fused kernel."""
        self.carried = Carried(recorder)

    def forward(
        self, owned: Callable[[], Iterable[int]], given: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Record an outermost forward; the arguments are those of :meth:`Carried.forward`."""
        on = torch.is_grad_enabled()
        self._grad["on" if on else "off"] += 1
        self._graphs += on
        self._most_graphs = max(self._most_graphs, self._graphs)
        self.carried.forward(owned, given)

    def model(self, module: torch.nn.Module) -> None:
        """Record a model: its size, its largest parameters and how it is sharded."""
        named = [
            (name, one)
            for name, one in module.named_parameters()
            if not isinstance(one, torch.nn.UninitializedParameter)
        ]
        named.sort(key=lambda pair: (-pair[1].numel(), pair[0]))
        elements: Counter[torch.dtype] = Counter()
        for _, one in named:
            elements[one.dtype] += one.numel()
        units = {
            general_path(path) or "the root"
            for path, part in module.named_modules()
            if any(base.__name__ in _SHARDING for base in type(part).__mro__)
        }
        self._models[type(module).__name__] = {
            "parameters": elements.total(),
            "trained": sum(one.numel() for _, one in named if one.requires_grad),
            "dtype": _name_of(elements.most_common(1)[0][0]) if elements else "",
            "largest": {general_path(name): list(one.shape) for name, one in named[:MOST_LARGEST]},
            **({"sharded": sorted(units)} if units else {}),
        }

    def given(self, tensor: torch.Tensor) -> None:
        """Record the shape of a ``tensor`` of numbers that a model is called with."""
        shape = tuple(tensor.shape)
        is_new = shape not in self._inputs and len(self._inputs) < MOST_LARGEST
        if is_new and all(type(size) is int for size in shape):  # a jagged tensor has a symbol
            self._inputs.append(shape)

    def recomputed(self, path: str) -> None:
        """Record that the module ``path`` runs within backward."""
        if len(self._recomputed) < MOST_NAMES:
            self._recomputed[general_path(path)] = None

    def backward(self, retained: bool) -> None:
        """Record a backward, and whether it keeps its graph."""
        self._graphs = 0
        self._retained += retained

    def zeroed(self, set_to_none: bool) -> None:
        """Record that gradients are freed or filled with zeros."""
        self._kept_zeros += not set_to_none

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the kind and state of an optimizer that has stepped."""
        kind = type(optimizer).__name__
        if kind not in self._optimizers:
            names = {
                name
                for _, name, value in states_of(optimizer)
                if isinstance(value, torch.Tensor) and value.dim() > 0
            }
            self._optimizers[kind] = {"kind": _implementation(optimizer), "state": sorted(names)}

    def called(self, path: str, arguments: tuple[Any, ...]) -> None:
        """Record whether an image among a module's ``arguments`` is channels last."""
        image = arguments[0] if arguments else None
        if isinstance(image, torch.Tensor) and image.dim() == 4 and image.is_cuda:
            last = image.is_contiguous(memory_format=torch.channels_last)
            if len(self._layouts) < MOST_NAMES or path in self._layouts:
                self._layouts[general_path(path)] = "channels_last" if last else "contiguous"

    def attends(self, *params: Any) -> str:
        """Record a call of attention on query, key, value, mask, dropout, causality and grouping.

        Returns why no fused kernel supports it; empty if one does or torch cannot tell.
        """
        query = params[0]
        if not isinstance(query, torch.Tensor) or not query.is_cuda:
            return ""
        fused = _has_fused_kernel(*params)
        if fused is None:
            return ""
        word = "fused" if fused else "unfused"
        self._attention[word] = self._attention.get(word, 0) + 1
        why = "" if fused else _why_unfused(query)
        if why:
            self._unfused[why] = None
        return why

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: builtin types; events that did not occur are left out."""
        found: dict[str, Any] = {
            "grad": {word: count for word, count in self._grad.items() if count},
            "graphs": self._most_graphs if self._most_graphs > 1 else 0,
            "retain_graph": self._retained,
            "zeroed_gradients": self._kept_zeros,
            "recomputed": sorted(self._recomputed),
            "models": self._models,
            "inputs": [list(shape) for shape in self._inputs],
            "layouts": dict(sorted(self._layouts.items())),
            "optimizers": self._optimizers,
            "attention": {
                **self._attention,
                **({"why": list(self._unfused)} if self._unfused else {}),
            },
            "carried": self.carried.to_dict(),
        }
        return {name: value for name, value in found.items() if value}


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    """Return ``fused``, ``foreach`` or ``for-loop``; ``foreach`` is the default on CUDA
    (``_default_to_fused_or_foreach`` in torch/optim/optimizer.py)."""
    group: Mapping[str, Any] = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is False or "foreach" not in group:
        return "for-loop"
    on_cuda = all(parameter.is_cuda for parameter in group["params"])
    return "foreach" if group.get("foreach") or on_cuda else "for-loop"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_fused_kernel(*params: Any) -> bool | None:
    """Return whether a fused kernel supports such a call; ``None`` where torch cannot tell."""
    cuda = torch.backends.cuda
    try:
        call = cuda.SDPAParams(*params)
        return (
            cuda.can_use_flash_attention(call)
            or cuda.can_use_efficient_attention(call)
            or cuda.can_use_cudnn_attention(call)
        )
    except (TypeError, RuntimeError, SimulationError):
        return None


def _why_unfused(query: torch.Tensor) -> str:
    if query.dtype not in _FUSED_DTYPES:
        return f"no fused kernel takes {_name_of(query.dtype)}"
    capability = torch.cuda.get_device_capability(query.device)
    if query.dtype is torch.bfloat16 and capability < _BFLOAT16_SINCE:
        major, minor = capability
        return f"no fused kernel takes bfloat16 at compute capability {major}.{minor}"
    if query.dim() == 4 and query.shape[-1] % _ALIGNED_HEAD:
        return f"no fused kernel takes heads of {query.shape[-1]}, which 8 does not divide"
    return "no fused kernel takes such a call"


_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_KEPT = (
    ("transformer_engine.pytorch.module.base", ("_cublas_workspace",)),
    ("transformer_engine.pytorch.module.base", ("_multi_stream_cublas_workspace",)),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_amax_buffer")),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_amax_history_buffer")),
    ("transformer_engine.pytorch.fp8", ("FP8GlobalStateManager", "global_scale_buffer")),
    (f"{_ATTENTION}.utils", ("_cu_seqlens_cache",)),
    (f"{_ATTENTION}.softmax", ("_default_causal_mask",)),
    (f"{_ATTENTION}.dot_product_attention", ("_alibi_cache",)),
)
"""The attributes that hold memory until the process ends, by module."""


def kept_by_libraries() -> list[Any]:
    """Return the objects that imported libraries keep until the process ends."""
    values: list[Any] = []
    for module, path in _KEPT:
        value: Any = sys.modules.get(module)
        for name in path:
            value = getattr(value, name, None)
        values.append(value)
    return values


def releases_of(sites: Iterable[str], root: str) -> dict[str, str]:
    """Return the installed versions, by name, of the packages that contain ``sites`` (path:line).

    Files under ``root`` are the project's own.
    """
    paths = {site.rpartition(":")[0] for site in sites}
    foreign = {path for path in paths if path and not Path(root, path).exists()}
    packages = {path.partition("/")[0].removesuffix(".py") for path in foreign}
    return {package: found for package in sorted(packages) if (found := _release(package))}


@cache
def _release(package: str) -> str:
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):
        return ""
