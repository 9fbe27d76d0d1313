"""Cases in which the two devices cannot be compared, and why.

Three reasons only: values that decide how much is taken, workspaces that a library chooses, and
what a clock decides. Everything else is a difference.
"""

from __future__ import annotations

import re

VALUES = "values decide what is taken"
LIBRARY = "a library chooses its workspace"
CLOCK = "a clock decides"

_VALUES = "combinations to_sparse unique unique_consecutive sparse_sampled_addmm"
"""Of how many elements differ, and of how many a sparse tensor has."""

_VALUES_OF_GRADIENTS = "cumprod index_fill masked_fill prod masked_prod"
"""Their gradients ask which elements are zero, or equal."""

_VALUES_OF_OPTIMIZERS = "LBFGS"
"""It stops where a gradient is small."""

_LIBRARY_OF_MODULES = "nn_RNN nn_GRU nn_LSTM"
"""cuDNN's layout of weights, its workspace and its reserve."""


def _pattern(names: str, corpus: str = "(?:op|layout)", passes: str = ".*") -> re.Pattern[str]:
    return re.compile(f"{corpus}/({'|'.join(names.split())})/.*/{passes}$")


_VALUES_OF_PROGRAMS = re.compile(
    r"(scenario/(reductions/prod|optimizers/ASGD one by one)|program/weighted_losses"
    r"|stranger/faster_rcnn/.*)/run$"
)
"""Whether an element is zero, whether ASGD averages yet, how many targets are not ignored, which
boxes torchvision's kernel keeps."""

_LIBRARY_OF_PROGRAMS = re.compile(r"scenario/recurrent/LSTM dropout/run$")
"""The size of the state of cuDNN's dropout."""

_CLOCK_OF_PROGRAMS = re.compile(r"stranger/gradients_of_samples/.*/run$")
"""When the GPU's thread drops its last task: two runs on the dry device differ."""

_REASONS = (
    (_pattern(_VALUES), VALUES),
    (_pattern(_VALUES_OF_GRADIENTS, passes="backward"), VALUES),
    (_pattern(_VALUES_OF_OPTIMIZERS, "optim"), VALUES),
    (_pattern(_LIBRARY_OF_MODULES, "module"), LIBRARY),
    (_VALUES_OF_PROGRAMS, VALUES),
    (_LIBRARY_OF_PROGRAMS, LIBRARY),
    (_CLOCK_OF_PROGRAMS, CLOCK),
)
"""Patterns of passes, and why those cannot be compared."""


_GIVEN_VALUES = re.compile(r"(?:op|layout)/__getitem__/.*bool\[")
"""Indices that are flags."""


def exception_of(case: str, name: str, given: str) -> str | None:
    """Return why the pass ``name`` of ``case``, ``given`` these shapes, is not comparable."""
    if _GIVEN_VALUES.match(f"{case} {given}"):
        return VALUES
    return next((reason for pattern, reason in _REASONS if pattern.match(f"{case}/{name}")), None)
