"""Assumptions about unknown values, each with a note, so that common code keeps running.

Nothing here is a guess at a number: gradients are finite, and an unknown token is none of
the special ones, and not negative.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.machine.signatures import Args

Assumption = Callable[[Any, Args, Any], "torch.Tensor | None"]
"""(``Values``, arguments, result) -> the target that an in-place operator leaves as it was."""

GENERATION = (
    "transformers compared tokens that are not computed with special tokens: none of them was "
    "taken for one, so generation runs to its maximum length"
)
FINITE = (
    "GradScaler looked for infinities in gradients that are not computed: none was taken for "
    "one, so its steps are not skipped"
)
_FINITE_NORM = (
    "clip_grad_norm_(error_if_nonfinite=True) looked for infinities in gradients that shapes do "
    "not have: none was found"
)
_VALID = (
    "torch.distributions validated arguments whose values are not computed: they were taken for "
    "valid"
)
_EVERY_RANK = "SyncBatchNorm assumed that no rank has an empty batch"
_CONDITIONS: dict[tuple[str, str], tuple[bool, str]] = {
    ("nn.utils.clip_grad", "_get_total_norm"): (False, _FINITE_NORM),
    ("nn.utils.clip_grad", "get_total_norm"): (False, _FINITE_NORM),
    ("nn.utils.clip_grad", "clip_grad_norm_"): (False, _FINITE_NORM),
    ("nn.init", "_no_grad_trunc_normal_"): (
        False,
        "trunc_normal_ drew its values once: which of them it would have drawn again is not known",
    ),
    ("nn.functional", "gaussian_nll_loss"): (
        False,
        "gaussian_nll_loss looked for negative variances, which are not computed: none was found",
    ),
    ("distributions.distribution", "__init__"): (True, _VALID),
    ("distributions.distribution", "_all_true_or_runtime_assert"): (True, _VALID),
    ("distributions.distribution", "_validate_sample"): (True, _VALID),
    ("distributions.constraints", "check"): (True, _VALID),
    ("distributions.continuous_bernoulli", "__init__"): (True, _VALID),
    ("distributions.geometric", "__init__"): (True, _VALID),
}
"""Conditions in torch's own code: module and function -> the answer, and the note.

Sources: torch/nn/utils/clip_grad.py, nn/functional.py and distributions of torch 2.6 to 2.15;
torch/nn/init.py since 2.13.
"""


def assumption_of(frame: FrameType) -> tuple[bool, str] | None:
    """Return the answer to a condition in torch's function ``frame``, and a note, if it has one."""
    module = _module_of(frame)
    if not module.startswith("torch."):
        return None
    return _CONDITIONS.get((module.removeprefix("torch."), frame.f_code.co_name))


_SEEDING = frozenset({"torch.utils.data.dataloader", "torch.utils.data.sampler"})
"""Modules that read an integer only to seed a generator with it (2.6 to 2.15)."""


def drawn_seed(device: int) -> int | None:
    """Return a seed if one of torch's modules reads one; ``None`` for any other reader.

    With ``cuda`` as the default device these modules draw seeds there, from the generator of the
    GPU of index ``device``, and so does this.
    """
    if _caller(_OWN)[0] not in _SEEDING:
        return None
    generator = torch.cuda.default_generators[device]
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def seeds_dropout() -> bool:
    """Return whether a recurrent layer reads the seed of its dropout, which sizes do not depend on.

    Source: get_dropout_state of aten/src/ATen/native/cudnn/RNN.cpp, torch 2.6 to 2.15.
    """
    return _caller(_OWN)[0] == "torch.nn.modules.rnn"


class _Printing(threading.local):
    prints = False


_printing = _Printing()


def printing() -> AbstractContextManager[None]:
    """Format a tensor inside, in this thread: nothing but its text depends on its numbers."""
    return having(_printing, "prints", True)


def is_printing() -> bool:
    """Return whether this thread formats a tensor."""
    return _printing.prints


_COMPARING = ("transformers.generation.", "transformers.modeling_utils")


def _is_printed(answer: bool) -> Assumption:
    """Assume that numbers which are printed are finite, not zero, no integers, and about equal."""

    def assume(values: Any, args: Args, result: Any) -> None:
        if is_printing():
            values.keep(result, torch.full(result.shape, answer, device="cpu"))

    return assume


def _is_special_token(answer: bool) -> Assumption:
    assume_printed = _is_printed(answer)

    def assume(values: Any, args: Args, result: Any) -> None:
        assume_printed(values, args, result)
        if args[0].dtype.is_floating_point or "transformers" not in sys.modules:
            return
        if _caller(_OWN, "torch.")[0].startswith(_COMPARING):
            values.notes.assume(GENERATION)
            values.keep(result, torch.full(result.shape, answer, device="cpu"))

    return assume


def _has_input(values: Any, args: Args, result: Any) -> None:
    if _caller(_OWN) != ("torch.nn.modules._functions", "forward"):
        return
    values.notes.assume(_EVERY_RANK)
    values.keep(result, torch.ones(result.shape, dtype=torch.bool, device="cpu"))


_OWN = __name__.partition(".")[0] + "."


def _caller(*others: str) -> tuple[str, str]:
    """Return module and function of the innermost frame that is in no module of ``others``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith(others):
        frame = frame.f_back
    return _module_of(frame), frame.f_code.co_name


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _no_infinity(values: Any, args: Args, result: Any) -> torch.Tensor | None:
    found: torch.Tensor = args[1]
    if values.of(found) is None:
        return None
    values.notes.assume(FINITE)
    return found


_aten = torch.ops.aten

ASSUMPTIONS: dict[Any, Assumption] = {
    _aten.isin.Tensor_Tensor: _is_special_token(False),
    _aten.isin.Tensor_Scalar: _is_special_token(False),
    _aten.eq.Tensor: _is_special_token(False),
    _aten.eq.Scalar: _is_special_token(False),
    _aten.ne.Tensor: _is_special_token(True),
    _aten.ne.Scalar: _is_special_token(True),
    _aten.lt.Scalar: _is_special_token(False),
    _aten.gt.Scalar: _is_printed(False),
    _aten.bitwise_and.Tensor: _is_printed(True),
    _aten.ge.Scalar: _has_input,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _no_infinity,
}
"""By overload.

Sources: transformers/generation (stopping_criteria.py, utils.py) and modeling_utils.py
(warn_if_padding_and_no_attention_mask) of transformers 5.23; torch/amp/grad_scaler.py
(_unscale_grads_, _maybe_opt_step), torch/nn/modules/_functions.py (SyncBatchNorm.forward) and
torch/_tensor_str.py (_Formatter) of torch 2.6 to 2.15.
"""
