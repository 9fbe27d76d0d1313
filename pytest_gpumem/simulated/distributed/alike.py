"""The results of collectives where the tensors that every rank sends are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Sent(NamedTuple):
    """The tensors that one rank sends and receives."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    rank: int
    size: int
    operation: str
    """The reduction: ``SUM``, ``MAX``; empty if unknown."""
    splits: Sequence[int]
    """Elements for each rank, where these are not equal parts."""


def unchanged(sent: Sent) -> None:
    """Broadcast: the root has the same values."""


def reduced(sent: Sent) -> None:
    """Multiply sums by the number of ranks; other reductions leave equal values as they are."""
    for tensor in sent.written:
        if sent.operation == "SUM":
            tensor.mul_(sent.size)


def exchanged(sent: Sent) -> None:
    """Write for each rank's part what this rank sends itself."""
    for source, target in zip(sent.read, sent.written, strict=True):
        own = (source.split(sent.splits) if sent.splits else source.chunk(sent.size))[sent.rank]
        target.view(sent.size, *own.shape).copy_(own)


def gathered(sent: Sent) -> None:
    """Write to every part what this rank sends."""
    parts = len(sent.written) // len(sent.read)
    for position, tensor in enumerate(sent.written):
        source = sent.read[position // parts]
        tensor.view(-1, *source.shape).copy_(source)


def kept(sent: Sent) -> None:
    """Write what the only rank of a group sends to its own results, for any collective."""
    for source, target in zip(sent.read, sent.written, strict=False):
        target.view(source.shape).copy_(source)
