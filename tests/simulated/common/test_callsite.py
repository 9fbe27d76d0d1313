"""An allocation is named by the operator that a user called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.common import callsite


def _convolution() -> torch.Tensor:
    return torch.nn.functional.conv2d(
        torch.ones(1, 3, 8, 8, device="cuda"), torch.ones(4, 3, 3, 3, device="cuda")
    )


def _recurrent() -> torch.Tensor:
    result: torch.Tensor = torch.nn.GRU(4, 4).cuda()(torch.ones(2, 1, 4, device="cuda"))[0]
    return result


@pytest.mark.parametrize(
    ("run", "schema"), [(_convolution, "aten::convolution"), (_recurrent, "aten::_cudnn_rnn")]
)
def test_a_composite_operators_result_is_attributed_to_the_operator(
    run: Callable[[], torch.Tensor], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts allocate the result by ``empty``, a name that tells a user nothing."""
    made: list[callsite.Provenance] = []
    begin = callsite.Provenance.__init__

    def begun(self: callsite.Provenance, entries: object) -> None:
        begin(self, entries)  # type: ignore[arg-type]  # handed on as it came
        made.append(self)

    with simulate("T4"):
        monkeypatch.setattr(callsite.Provenance, "__init__", begun)
        run()
    names = [one.operator._schema.name for one in made if hasattr(one.operator, "_schema")]
    assert schema in names
    assert not {"aten::empty", "aten::new_empty", "aten::empty_like"} & set(names)
