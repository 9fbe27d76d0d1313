"""A kernel that nobody described: every command that runs code says what would describe it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from pytest_gpumem.cli import main

pytestmark = pytest.mark.usefixtures("forked_python")

MODULE = dedent(
    """
    import torch
    from torch import nn

    torch.library.define("gpumem_told::{name}", "(Tensor x) -> Tensor")

    class Net(nn.Module):
        def forward(self, x):
            return torch.ops.gpumem_told.{name}(x)

    def model():
        return Net()

    def step():
        Net()(torch.ones(128, device="cuda"))

    def test_step():
        step()

    if __name__ == "__main__":
        step()
    """
)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ("told.py", "--gpu", "T4")),
        ("predict", ("told.py:step", "--gpu", "T4")),
        ("predict", ("told.py::test_step", "--gpu", "T4")),
        ("predict", ("told.py:model", "--by", "layer", "--gpu", "T4", "--input", "2x128")),
        ("predict", ("told.py:step", "--by", "line", "--gpu", "T4")),
    ],
)
def test_a_refusal_ends_with_what_to_paste(
    command: str,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{command}_{len(options[0])}_{len(options)}"
    (tmp_path / "told.py").write_text(MODULE.replace("{name}", name))
    monkeypatch.chdir(tmp_path)

    code = main([command, *((*options[1:], options[0]) if command == "run" else options)])

    said = capsys.readouterr().err
    sentence, _, below = said.partition("\n\n")
    heading, _, snippet = below.partition("\n\n")
    assert code == 2
    assert f"gpumem_told::{name}" in sentence.splitlines()[-1]
    where = "conftest.py" if "::" in options[0] else "the code that it runs"
    assert heading == (
        f"to simulate gpumem_told::{name}, paste this into {where}, "
        "or take the dry device, which needs no description:"
    )
    assert f'@simulate_operator("gpumem_told::{name}")' in snippet
    compile(snippet, "conftest.py", "exec")
