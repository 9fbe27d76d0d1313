"""Operators that CUDA autocast casts, and the casts it keeps.

Source: aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, AT_FORALL_PROMOTE),
autocast_mode.cpp (cached_cast, the CUDA registrations) and cudnn/AutocastRNN.cpp. The lists are
those of torch 2.6 to 2.15; a name that a release does not have is passed over.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, overload_of
from pytest_gpumem.simulated.operators.engine import IN_PLACE, in_formula
from pytest_gpumem.simulated.operators.rnn import flat_copies
from pytest_gpumem.simulated.operators.rules import eligible, within

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""".split()

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    rms_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
""".split()
"""``linalg_matrix_sqrth`` came with 2.15: the header does not list it, but the release has a kernel
for it, and float32 is the only one of the two types that its implementation accepts."""

FLOAT32_OUTPUT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
"""Operators that get ``dtype=float32``, unless the caller named a type."""

_norm = torch.ops.aten.norm
FLOAT32_NORMS: dict[str, Callable[..., Any]] = {
    "norm.Scalar": lambda self, p=2: _norm.ScalarOpt_dtype(self, p, dtype=torch.float32),
    "norm.ScalarOpt_dim": lambda self, p, dim, keepdim=False: _norm.ScalarOpt_dim_dtype(
        self, p, dim, keepdim, dtype=torch.float32
    ),
}
"""Operators redispatched to the overload that takes a ``dtype``."""

PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()

BANNED = ("binary_cross_entropy",)

Policy = Callable[[Any, Args, Kwargs], Any]


_KEY = torch._C.DispatchKey.AutocastCUDA
_KEYS = torch._C.DispatchKeySet(_KEY)
_LAZY = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate).add(torch._C.DispatchKey.Negative)


@contextmanager
def of_parts() -> Iterator[None]:
    """Have autocast cast parts of what it has passed over, and conjugates resolved, as in C++."""
    hidden = _LAZY | _KEYS if within.passes_over else _LAZY
    local = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(local[0], local[1] - hidden):
        yield


class CastCache:
    """Casts of float32 leaves, kept until the outermost autocast context ends.

    Since 2.11 those made in inference mode are not kept, and those made under ``no_grad`` serve for
    gradients afterwards (``cached_cast``; up to 2.10 their leaves then got none).
    """

    def __init__(self, version: Version) -> None:
        self._for_gradients = version >= (2, 11)
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        """Replace torch's casting kernels, which apply only to real CUDA tensors."""
        if self._library is not None:
            return
        library = self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns that it has these kernels already.
            warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
            for names, policy in (
                (LOWER_PRECISION, self._run),
                (FLOAT32, partial(self._run, dtype=torch.float32)),
                (FLOAT32_OUTPUT, self._float32_output),
                (FLOAT32_NORMS, self._float32_norm),
                (PROMOTE, self._promote),
                (["_cudnn_rnn"], self._recurrent),
                (BANNED, self._banned),
            ):
                for name in names:
                    overload = overload_of(name)
                    if overload is not None:
                        library.impl(name, self._kernel(policy, overload), "AutocastCUDA")

    def clear(self) -> None:
        """Drop the cached casts."""
        self._casts.clear()

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Dispatch meta tensors to the casting kernels wherever autocast for CUDA is on."""
        with self.reachable_on_thread():
            try:
                yield
            finally:
                self.clear()
                if self._library is not None:
                    self._library._destroy()
                    self._library = None

    @contextmanager
    def reachable_on_thread(self) -> Iterator[None]:
        """Dispatch meta tensors to the casting kernels on one more thread of a simulation."""
        # Included for every tensor, so excluded until autocast itself lifts the exclusion.
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield

    # Casting.

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast(item, dtype) for item in value)
        if not eligible(value) or value.dtype == dtype:
            return value
        cacheable = (
            torch.is_autocast_cache_enabled()
            and dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and not (self._for_gradients and torch.is_inference_mode_enabled())
        )
        if not cacheable:
            return value.to(dtype)
        found = self._casts.get(id(value))
        if found is None:
            with torch.set_grad_enabled(self._for_gradients or torch.is_grad_enabled()):
                found = self._casts[id(value)] = (value, value.to(dtype))
        return found[1]

    def _run(
        self, overload: Any, args: Args, kwargs: Kwargs, dtype: torch.dtype | None = None
    ) -> Any:
        """Call ``overload`` with its arguments cast, by default to autocast's type, the last first.

        ``(*F)(cached_cast(to, args, device_type)...)`` of WrapFunction_: gcc for x86-64 evaluates
        arguments from the right, and destroys temporaries in the reverse order.
        """
        dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
        named = {name: self._cast(kwargs[name], dtype) for name in reversed(kwargs)}
        given = [self._cast(value, dtype) for value in reversed(args)]
        try:
            return overload(*reversed(given), **named)
        finally:
            while given:
                value = given.pop()
                # A vector of C++ frees its tensors first to last, a list of Python's last to first.
                while isinstance(value, list) and value:
                    del value[0]

    # Policies, under which an operator runs while autocast is off.

    def _kernel(self, policy: Policy, overload: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS), having(within, "passes_over", False):
                return policy(overload, args, kwargs)

        return kernel

    def _float32_output(self, overload: Any, args: Args, kwargs: Kwargs) -> Any:
        is_third = overload._schema.name.endswith("softmax")  # others have a keyword
        dtype = args[2] if is_third and len(args) > 2 else kwargs.get("dtype")
        if dtype is None and eligible(args[0]):
            args = args[:2] if is_third else args
            kwargs = {**kwargs, "dtype": torch.float32}
        return overload(*args, **kwargs)

    def _float32_norm(self, overload: Any, args: Args, kwargs: Kwargs) -> Any:
        typed = FLOAT32_NORMS[f"norm.{overload._overloadname}"]
        return (typed if eligible(args[0]) else overload)(*args, **kwargs)

    def _promote(self, overload: Any, args: Args, kwargs: Kwargs) -> Any:
        in_place = IN_PLACE.get(str(overload))
        if in_place is not None and in_formula(sys._getframe(2)):
            node = torch._C._current_autograd_node()
            operator = None if node is None else in_place(args, node.name())
            if operator is not None:
                return operator(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if eligible(value)]
        is_wide = any(tensor.dtype == torch.float32 for tensor in tensors)
        return self._run(overload, args, kwargs, torch.float32 if is_wide else None)

    def _recurrent(self, overload: Any, args: Args, kwargs: Kwargs) -> Any:
        """Cast cuDNN's layers, to float16 whatever autocast's type is.

        Source: aten/src/ATen/cudnn/AutocastRNN.cpp (_cudnn_rnn_cast_reflatten), torch 2.6 to 2.15.
        """
        input, weight, per_layer, buffer, hx, cx, *rest = args
        held = weight[0] if buffer is None else buffer
        if eligible(held) and held.dtype != torch.float16:
            buffer, weight = flat_copies(weight, per_layer, torch.float16)
        casts = [self._cast(one, torch.float16) for one in (cx, hx, input)]  # the last dies first
        return overload(casts[2], weight, per_layer, buffer, casts[1], casts[0], *rest)

    def _banned(self, overload: Any, args: Args, kwargs: Kwargs) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
            "autocast.\nMany models use a sigmoid layer right before the binary cross entropy "
            "layer.\nIn this case, combine the two layers using "
            "torch.nn.functional.binary_cross_entropy_with_logits\nor "
            "torch.nn.BCEWithLogitsLoss."
        )
