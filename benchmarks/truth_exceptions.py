"""Cases in which the two devices cannot be compared, and why.

Three reasons only: values that decide how much is taken, workspaces that a library chooses, and
times. Everything else is a difference.
"""

from __future__ import annotations

import re

VALUES = "values decide what is taken"
LIBRARY = "a library chooses its workspace"

_VALUES = """
    argwhere bincount combinations masked_scatter masked_select nonzero to_sparse unique
    unique_consecutive repeat_interleave
"""

_LIBRARY = """
    cholesky cholesky_inverse cholesky_solve geqrf linalg_.* logdet lu lu_solve lu_unpack
    matrix_exp norm_nuc ormqr pca_lowrank pinverse svd svd_lowrank triangular_solve
    fft_.* stft istft
"""
"""cuSOLVER, cuBLAS's factorizations, MAGMA and cuFFT."""


def _pattern(names: str) -> re.Pattern[str]:
    return re.compile(f"op/({'|'.join(names.split())})/")


_REASONS = ((_pattern(_VALUES), VALUES), (_pattern(_LIBRARY), LIBRARY))
"""Patterns of cases, and why those cannot be compared."""


def exception_of(case: str, name: str, outcome: str) -> str | None:
    """Return why the pass ``name`` of ``case`` is not comparable."""
    del name, outcome
    return next((reason for pattern, reason in _REASONS if pattern.match(case)), None)
