"""Which libraries have stand-ins; known without torch, as options name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """A library that cannot be installed without CUDA."""

    name: str
    """Of its distribution."""
    version: str
    """The release whose sources say what is allocated."""
    package: str
    """What is imported, and the folder or module of this one that stands for it."""
    taken_unasked: bool = False
    """Whether others take it wherever they find it, and go on without it elsewhere: what a test
    allocates would depend on when they looked, so it is there only where it is named."""
    without: frozenset[str] = frozenset()
    """Modules of that release that have no stand-in, with all that is below them."""

    @property
    def sentence(self) -> str:
        """What readers of numbers have to know."""
        return (
            f"{self.name} is not installed: a stand-in allocated what {self.name} "
            f"{self.version} does"
        )

    def lacks(self, module: str) -> bool:
        """Whether the release has ``module``, and the stand-in does not."""
        return any(module == each or module.startswith(f"{each}.") for each in self.without)


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
        ),
        Library("causal-conv1d", "1.7.0", "causal_conv1d", taken_unasked=True),
    )
}
"""By name."""

UNNAMED = tuple(name for name, library in LIBRARIES.items() if not library.taken_unasked)
"""Those that are there without being named."""
