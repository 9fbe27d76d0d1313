"""What a collective writes, where what every rank sends is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Sent(NamedTuple):
    """What one rank sends and receives."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    rank: int
    size: int
    operation: str
    """How values are reduced: ``SUM``, ``MAX``; empty where nobody knows."""
    splits: Sequence[int]
    """How much goes to each rank, where these are not equal parts."""


def unchanged(sent: Sent) -> None:
    """A broadcast: the root has the same values."""


def reduced(sent: Sent) -> None:
    """Equal values are added up; other reductions leave them as they are."""
    for tensor in sent.written:
        if sent.operation == "SUM":
            tensor.mul_(sent.size)


def exchanged(sent: Sent) -> None:
    """Every rank sends this one what it sends itself."""
    for source, target in zip(sent.read, sent.written, strict=True):
        own = (source.split(sent.splits) if sent.splits else source.chunk(sent.size))[sent.rank]
        target.view(sent.size, *own.shape).copy_(own)


def gathered(sent: Sent) -> None:
    """Every part is what this rank sends."""
    parts = len(sent.written) // len(sent.read)
    for position, tensor in enumerate(sent.written):
        source = sent.read[position // parts]
        tensor.view(-1, *source.shape).copy_(source)


def kept(sent: Sent) -> None:
    """What the only rank of a group sends it receives, whatever the collective."""
    for source, target in zip(sent.read, sent.written, strict=False):
        target.view(source.shape).copy_(source)
