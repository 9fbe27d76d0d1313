"""FusedSGD, FusedAdagrad, FusedLAMB, FusedNovoGrad and FusedMixedPrecisionLamb of apex 25.09.

Each updates all parameters of a type by one kernel. Source: apex/optimizers/fused_sgd.py,
fused_adagrad.py, fused_lamb.py, fused_novograd.py and fused_mixed_precision_lamb.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.apex.extensions import AMP
from pytest_gpumem.simulated.stand_ins.apex.optimizers import DroppingGradients

_CHUNK = 2048 * 32
_DTYPES = (torch.float16, torch.float32)
Lists = list[list[Tensor]]


class _Fused(DroppingGradients):
    """What these optimizers have in common: state of each parameter, and lists of a type each."""

    _kernel: str
    _states: tuple[str, ...]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        device = self.param_groups[0]["params"][0].device
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device=device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None if closure is None else closure()
        shared = self._before()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists = self._lists(group)
            for index, dtype in enumerate(_DTYPES):
                self._prepare(group, lists)
                if lists[dtype][0]:
                    self._apply(self._kernel, lists[dtype], self._options(group, index, shared))
        return loss

    def _before(self) -> Any:
        """Return what is made once for all groups."""

    def _prepare(self, group: dict[str, Any], lists: dict[torch.dtype, Lists]) -> None:
        """Make what a group has beside the state of each parameter."""

    def _options(self, group: dict[str, Any], index: int, shared: Any) -> list[Any]:
        """Return what the kernel is given behind the lists."""
        return []

    def _apply(self, name: str, lists: Lists, options: list[Any]) -> Any:
        return AMP[name](_CHUNK, self._dummy_overflow_buf, lists, *options)

    def _lists(self, group: dict[str, Any]) -> dict[torch.dtype, Lists]:
        """Gradients, parameters and their state, of each type."""
        lists: dict[torch.dtype, Lists] = {
            dtype: [[] for _ in range(2 + len(self._states))] for dtype in _DTYPES
        }
        for p in group["params"]:
            if p.grad is None:
                continue
            name = type(self).__name__
            if p.grad.is_sparse:
                raise RuntimeError(f"{name} does not support sparse gradients")
            state = self.state[p]
            for key in () if state else self._states:
                state[key] = torch.zeros_like(p.data)
            if p.dtype not in lists:
                raise RuntimeError(f"{name} only support fp16 and fp32.")
            made = [state[key] for key in self._states]
            for into, tensor in zip(lists[p.dtype], (p.grad.data, p.data, *made), strict=True):
                into.append(tensor)
        return lists


class FusedSGD(_Fused):
    """SGD; parameters of other types are left alone."""

    _kernel = "multi_tensor_sgd"
    _states = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if lr is not None and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.wd_after_momentum, self.set_grad_none = wd_after_momentum, set_grad_none

    def _lists(self, group: dict[str, Any]) -> dict[torch.dtype, Lists]:
        """Momentums of one type are made before those of the other."""
        lists = {}
        for dtype in _DTYPES:
            chosen = [p for p in group["params"] if p.dtype == dtype and p.grad is not None]
            lists[dtype] = super()._lists({"params": chosen})[dtype]
        return lists

    def _options(self, group: dict[str, Any], index: int, shared: Any) -> list[Any]:
        named = [group[name] for name in ("weight_decay", "momentum", "dampening", "lr")]
        return [*named, group["nesterov"], False, self.wd_after_momentum, 1.0]


class FusedAdagrad(_Fused):
    """Adagrad."""

    _kernel = "multi_tensor_adagrad"
    _states = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.adagrad_w_mode, self.set_grad_none = int(adagrad_w_mode), set_grad_none

    def _options(self, group: dict[str, Any], index: int, shared: Any) -> list[Any]:
        return [group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"]]


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant.")


class FusedLAMB(_Fused):
    """LAMB, whose moments have the parameters' type."""

    _kernel = "multi_tensor_lamb"
    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        self.use_nvlamb = use_nvlamb

    def _before(self) -> tuple[Tensor, ...]:
        """Return norms: of all gradients, and of those of each type."""
        device = self.param_groups[0]["params"][0].device
        grads: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in _DTYPES}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.dtype not in grads:
                        raise RuntimeError("FusedLAMB only support fp16 and fp32.")
                    grads[p.dtype].append(p.grad.data)
        wide, narrow = torch.zeros(1, device=device), torch.zeros(1, device=device)
        if grads[torch.float32]:
            wide = self._norm(grads[torch.float32])
        if grads[torch.float16]:
            narrow = self._norm(grads[torch.float16])
        return self._norm([wide, narrow]), wide, narrow

    def _norm(self, tensors: list[Tensor]) -> Tensor:
        norm: Tensor = self._apply("multi_tensor_l2norm", [tensors], [False])[0]
        return norm


class FusedNovoGrad(_Fused):
    """NovoGrad: one second moment for each parameter."""

    _kernel = "multi_tensor_novograd"
    _states = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)
        self.moment_mode, self.set_grad_none = int(not reg_inside_moment), set_grad_none

    def _prepare(self, group: dict[str, Any], lists: dict[torch.dtype, Lists]) -> None:
        """Begin with norms of gradients, which the library reads back one by one, or with zeros."""
        if "exp_avg_sq" in group:
            return
        if group["norm_type"] not in (0, 2):
            raise RuntimeError("FusedNovoGrad only support l2/inf norm now.")
        device = self.param_groups[0]["params"][0].device
        for dtype in () if group["init_zero"] else _DTYPES:
            for grad in lists[dtype][0]:
                _norm_of(grad, group["norm_type"])
        group["exp_avg_sq"] = [
            torch.empty(len(lists[dtype][0]), dtype=torch.float32, device=device)
            for dtype in _DTYPES
        ]

    def _options(self, group: dict[str, Any], index: int, shared: Any) -> list[Any]:
        return [group["exp_avg_sq"][index]]


def _norm_of(grad: Tensor, kind: int) -> Tensor:
    # In one expression: a copy in float32 goes as soon as its squares are there.
    if kind == 0:
        return torch.max(torch.abs(grad.to(torch.float32)))
    return torch.sum(torch.pow(grad.to(torch.float32), 2)).sqrt()


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """LAMB with master weights and moments of float32 for parameters of one narrow type."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32),
            "step": torch.tensor([step], dtype=torch.int),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)
        self.device = self.param_groups[0]["params"][0].device
        for group in self.param_groups:
            for name in ("lr", "step"):
                group[name] = group[name].to(device=self.device)
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device=self.device)
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[list[Tensor | None]] = []
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the group tensors of its own."""
        super().add_param_group(param_group)
        for name, default in self.defaults.items():
            if isinstance(default, Tensor):
                self.param_groups[-1][name] = default.clone()

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Update all parameters that have gradients."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            self._step(grad_scaler)
        return loss

    def _step(self, grad_scaler: Any) -> None:
        if not self.param_groups_full_precision:
            self.param_groups_full_precision = [
                [p.clone().detach().to(torch.float32) if self._is_narrow(p) else None for p in ps]
                for ps in (group["params"] for group in self.param_groups)
            ]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if grad_scaler is None:
            found = torch.zeros((1,), device=self.device)
        else:
            found = grad_scaler._check_inf_per_device(self)[self.device]
        self._dummy_overflow_buf.copy_(found)
        if grad_scaler:
            scale = grad_scaler._get_scale_async()
            inverse = scale.double().reciprocal().float()
        else:
            scale = torch.ones((1,), device=self.device)
            inverse = torch.ones((1,), device=self.device)
        largest = self.defaults["max_grad_norm"] * scale
        given = [[grad for grad in grads if grad is not None]]
        norm = AMP["multi_tensor_l2norm_mp"](_CHUNK, self._dummy_overflow_buf, given, False)[0]
        groups = zip(self.param_groups, self.param_groups_full_precision, strict=True)
        for group, masters in groups:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            lists = self._lists(group["params"], masters)
            AMP["multi_tensor_lamb_mp"](
                *(_CHUNK, self._dummy_overflow_buf, lists),
                *(group["lr"], group["step"], norm, largest, found, inverse),
            )

    def _is_narrow(self, p: Tensor) -> bool:
        return self.reduced_precision_dtype is not None and p.dtype == self.reduced_precision_dtype

    def _lists(self, params: list[Tensor], masters: list[Tensor | None]) -> Lists:
        lists: Lists = [[] for _ in range(4 if self.reduced_precision_dtype is None else 5)]
        for p, master in zip(params, masters, strict=True):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                dtype = torch.float32 if self._is_narrow(p) else p.dtype
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p.data, dtype=dtype)
            updated = p.data if master is None else master
            given = p.grad.data, updated, state["exp_avg"], state["exp_avg_sq"], p.data
            for into, tensor in zip(lists, given, strict=False):
                into.append(tensor)
        return lists
