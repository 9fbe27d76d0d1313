"""A small project on which the commands run, and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pytest_gpumem.cli import main

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

NET = dedent(
    """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(256, 1024)
            self.activation = nn.ReLU()
            self.second = nn.Linear(1024, 128)

        def forward(self, x):
            x = self.first(x)
            x = self.activation(x)
            return self.second(x)


    def train():
        net = Net().cuda()
        optimizer = torch.optim.SGD(net.parameters())
        x = torch.randn(64, 256, device="cuda")
        loss = net(x).sum()
        loss.backward()
        optimizer.step()


    def model():
        return Net().cuda(), torch.ones(64, 256, device="cuda")


    def reserve():
        a, b = (torch.empty(10 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))


    def broken():
        return Net().cuda()(torch.ones(64, 255, device="cuda"))


    def value():
        if torch.randn(1000, 1000, device="cuda").sum() > 0:
            pass


    def costly_value():
        x = torch.randn(40_000, 40_000, device="cuda")
        if (x @ x @ x).sum() > 0:
            pass


    def needs(x):
        return x


    def share():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        extra = (rank == size - 1) << 21
        torch.empty((64 << 20) // size + extra, dtype=torch.uint8, device="cuda")


    def nothing():
        pass
    """
)


class Command:
    """One subcommand of ``gpumem``, in a folder with ``net.py``."""

    def __init__(
        self, name: str, folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
    ) -> None:
        self._name, self._options = name, options
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *arguments: str) -> tuple[int, list[str]]:
        """Run the command; return its exit code and its lines of output."""
        code = main((self._name, *arguments, *self._options))
        written = self._capsys.readouterr()
        assert written.err == ""
        return code, written.out.splitlines()

    def json(self, *arguments: str) -> Any:
        """Run the command with ``--json``; return the parsed output."""
        return json.loads("\n".join(self(*arguments, "--json")[1]))

    def refusal(self, *arguments: str) -> str:
        """Run the command; return the one sentence with which it refuses its input."""
        assert main((self._name, *arguments, *self._options)) == 2
        written = self._capsys.readouterr()
        assert written.out == ""
        (sentence,) = written.err.splitlines()
        return sentence


def command(name: str, *options: str) -> Callable[..., Command]:
    """Return a fixture that runs the subcommand ``name``, always with ``options``."""

    @pytest.fixture(name="gpumem")
    def fixture(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Command:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "net.py").write_text(NET)
        return Command(name, tmp_path, capsys, options)

    return fixture
