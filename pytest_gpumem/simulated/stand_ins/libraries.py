"""Which libraries have stand-ins; known without torch, as options name them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder


@dataclass(frozen=True)
class Library:
    """A library that cannot be installed without CUDA."""

    name: str
    """Of its distribution."""
    version: str
    """The release whose sources say what is allocated."""
    package: str
    """What is imported, and the folder or module of this one that stands for it."""
    beside: tuple[str, ...] = ()
    """What else of it is imported, at the top."""
    taken_unasked: bool = False
    """Whether others take it wherever they find it, and go on without it elsewhere: what a test
    allocates would depend on when they looked, so it is there only where it is named."""
    without: frozenset[str] = frozenset()
    """Modules of that release that have no stand-in, with all that is below them."""
    compiled: tuple[str, ...] = ()
    """Its extensions, which an installation without CUDA lacks: where the Python code is there,
    stand-ins take the place of these modules alone."""
    installing: str = ""
    """How to install the Python code without the extension, where there is no stand-in for it."""
    absent: frozenset[str] = frozenset()
    """What others ask of its modules, and that release does not have."""
    loaded: str = ""
    """Its extension, a file in its package, that it can do without where torch has no CUDA: all of
    its kernels that have a use here are torch's."""

    @property
    def is_missing(self) -> bool:
        """Whether the package is not installed."""
        return _is_nowhere(self.package, tuple(sys.path))

    @property
    def is_uncompiled(self) -> bool:
        """Whether its extensions are not installed."""
        path = tuple(sys.path)
        return bool(self.compiled) and all(_is_nowhere(each, path) for each in self.compiled)

    @property
    def sentence(self) -> str:
        """What readers of numbers have to know."""
        alone = self.compiled and not self.is_missing
        missing = f"{self.compiled[0]} of {self.name}" if alone else self.name
        return (
            f"{missing} is not installed: a stand-in allocated what {self.name} {self.version} does"
        )

    def lacks(self, module: str) -> bool:
        """Whether the release has ``module``, and the stand-in does not."""
        return any(module == each or module.startswith(f"{each}.") for each in self.without)


@lru_cache(maxsize=256)
def _is_nowhere(module: str, path: tuple[str, ...]) -> bool:
    return PathFinder.find_spec(module, list(path)) is None


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "flash-attn",
            "2.8.3",
            "flash_attn",
            without=frozenset(
                f"flash_attn.{module}"
                for module in (
                    "cute",
                    "flash_attn_triton",
                    "flash_attn_triton_amd",
                    "flash_attn_triton_og",
                    "flash_blocksparse_attention",
                    "flash_blocksparse_attn_interface",
                    "layers.patch_embed",
                    "models",
                    "modules",
                    "ops.activations",
                    "ops.fused_dense",
                    "ops.layer_norm",
                    "ops.rms_norm",
                    "ops.triton.k_activations",
                    "ops.triton.layer_norm",
                    "ops.triton.linear",
                    "ops.triton.mlp",
                    "utils",
                )
            ),
            compiled=("flash_attn_2_cuda",),
            absent=frozenset({"flash_attn.flash_attn_interface.flash_attn_cuda"}),
        ),
        Library(
            "flash-attn-3",
            "3.0.0",
            "flash_attn_interface",
            beside=("flash_attn_3",),
            taken_unasked=True,
            without=frozenset({"flash_attn_3._C"}),
        ),
        Library(
            "causal-conv1d",
            "1.7.0",
            "causal_conv1d",
            taken_unasked=True,
            compiled=("causal_conv1d_cuda",),
        ),
        Library(
            "mamba-ssm",
            "2.3.2.post1",
            "mamba_ssm",
            taken_unasked=True,
            without=frozenset({"mamba_ssm"}),
            compiled=("selective_scan_cuda",),
            installing=(
                "MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE "
                "pip install --no-build-isolation mamba-ssm"
            ),
        ),
        Library(
            "apex",
            "0.1",
            "apex",
            taken_unasked=True,
            without=frozenset(
                f"apex.{module}"
                for module in (
                    "RNN",
                    "amp",
                    "fp16_utils",
                    "fused_dense",
                    "mlp",
                    "parallel",
                    "reparameterization",
                    "transformer",
                    *(
                        f"contrib.{name}"
                        for name in (
                            "bottleneck",
                            "clip_grad",
                            "conv_bias_relu",
                            "cudnn_gbn",
                            "focal_loss",
                            "group_norm",
                            "groupbn",
                            "index_mul_2d",
                            "layer_norm",
                            "multihead_attn",
                            "nccl_allocator",
                            "openfold_triton",
                            "optimizers",
                            "peer_memory",
                            "sparsity",
                            "torchsched",
                            "transducer",
                        )
                    ),
                )
            ),
            compiled=("fused_layer_norm_cuda", "amp_C", "xentropy_cuda"),
        ),
        Library(
            "xformers",
            "0.0.35",
            "xformers",
            taken_unasked=True,
            without=frozenset(
                f"xformers.{module}"
                for module in (
                    "checkpoint",
                    "ops.fmha.ck",
                    "ops.fmha.dispatch",
                    "ops.fmha.flash3",
                    "ops.fmha.triton_splitk",
                    "ops.indexing",
                    "ops.modpar_layers",
                    "ops.rmsnorm",
                    "ops.rope_padded",
                    "ops.seqpar",
                    "ops.sequence_parallel_fused_ops",
                    "ops.sp24",
                    "ops.swiglu_op",
                    "ops.tiled_matmul",
                    "ops.unbind",
                    "profiler",
                    "sparse",
                    "triton",
                )
            ),
            loaded="_C",
        ),
        Library(
            "transformer-engine",
            "2.8.0",
            "transformer_engine",
            taken_unasked=True,
            without=frozenset(
                f"transformer_engine.{module}"
                for module in (
                    "debug",
                    "jax",
                    "pytorch.attention.dot_product_attention",
                    "pytorch.attention.inference",
                    "pytorch.attention.multi_head_attention",
                    "pytorch.attention.rope",
                    "pytorch.cpp_extensions",
                    "pytorch.graph",
                    "pytorch.ops",
                    "pytorch.optimizers",
                    "pytorch.tensor",
                )
            ),
        ),
    )
}
"""By name."""


def chosen(names: Sequence[str] | None) -> list[Library]:
    """The libraries ``names``; for ``None``, those that are there without being named.

    Of a library whose Python code is installed, the extension is there unasked.
    """
    if names is not None:
        return [LIBRARIES[name] for name in names]
    return [each for each in LIBRARIES.values() if not each.taken_unasked or not each.is_missing]
