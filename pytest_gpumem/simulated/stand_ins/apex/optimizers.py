"""FusedAdam: apex/optimizers/fused_adam.py of apex 25.09."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.apex.extensions import AMP

_CHUNK = 2048 * 32
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class DroppingGradients(torch.optim.Optimizer):
    """Drops gradients, where ``set_grad_none`` is true, one by one."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, unless ``set_grad_none`` is false."""
        if not self.set_grad_none:
            super().zero_grad()
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class FusedAdam(DroppingGradients):
    """Adam whose moments are float32; all parameters of a type are updated by one kernel."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError(
                "Master weights is currently only supported with the capturable version."
            )
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32) if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self.param_groups_master = [
            {
                "params": [
                    p.clone().detach().float() if master_weights else None for p in group["params"]
                ]
            }
            for group in self.param_groups
        ]
        if capturable:
            for group in self.param_groups:
                if group["params"]:
                    group["lr"] = group["lr"].to(device=group["params"][0].device)
            self._step_supports_amp_scaling = True
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Update all parameters that have gradients."""
        if any(each is not None for each in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam has been updated.  Simply initialize it identically to "
                "torch.optim.Adam, and call step() with no arguments."
            )
        loss = None if closure is None else closure()
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            if group["params"]:
                self._step(group, masters["params"], grad_scaler)
        return loss

    def _step(self, group: dict[str, Any], masters: list[Any], grad_scaler: Any) -> None:
        device = group["params"][0].device
        if "step" not in group:
            one = torch.tensor([1], dtype=torch.int, device=device) if self.capturable else 1
            group["step"] = one
        elif self.capturable:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
        else:
            group["step"] += 1
        lists = self._lists(group["params"], masters)
        options: list[Any] = [
            *(group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode),
            *(1 if group["bias_correction"] else 0, group["weight_decay"]),
        ]
        if self.capturable:
            options.append(self._unscaling(device, grad_scaler))
        for tensors in lists.values():
            if not tensors[0]:
                continue
            name = "multi_tensor_adam_capturable" if self.capturable else "multi_tensor_adam"
            if len(tensors) > 4:
                name += "_master"
            AMP[name](_CHUNK, self._dummy_overflow_buf, tensors, *options)

    def _lists(self, params: list[Any], masters: list[Any]) -> dict[torch.dtype, list[list[Any]]]:
        """Gradients, parameters, moments and master weights of each type."""
        lists: dict[torch.dtype, list[list[Any]]] = {
            dtype: [[] for _ in range(5 if self._has_masters(dtype) else 4)] for dtype in _DTYPES
        }
        for p, master in zip(params, masters, strict=True):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(
                    "FusedAdam does not support sparse gradients, please consider SparseAdam "
                    "instead"
                )
            state = self.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p.data).float()
                state["exp_avg_sq"] = torch.zeros_like(p.data).float()
            if p.dtype not in lists:
                raise RuntimeError("FusedAdam only support fp16 and fp32.")
            given = p.grad.data, p.data, state["exp_avg"], state["exp_avg_sq"], master
            for into, tensor in zip(lists[p.dtype], given, strict=False):
                into.append(tensor)
        return lists

    def _has_masters(self, dtype: torch.dtype) -> bool:
        return self.master_weights and dtype != torch.bfloat16

    def _unscaling(self, device: torch.device, grad_scaler: Any) -> Tensor:
        """What gradients are multiplied by; whether one is infinite goes into the buffer."""
        if grad_scaler is None:
            found = torch.zeros((1,), device=device)
        else:
            found = grad_scaler._check_inf_per_device(self)[device]
        self._dummy_overflow_buf.copy_(found)
        if not grad_scaler:
            scale = torch.ones((1,), device=device)
            inverse = torch.ones((1,), device=device)
            del scale
            return inverse
        scaled: Tensor = grad_scaler._get_scale_async().double().reciprocal().float()
        return scaled
