"""Protection of existing checkpoints: a simulation has shapes to write, and no values."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pytest_gpumem.simulated.common.callsite import callers_line, user_line
from pytest_gpumem.simulated.surface.checkpoints import gives_no_values, restore_unknown

_MARK = restore_unknown.__name__.encode()
"""The name that the pickle of a tensor without values calls; torch.save does not compress it.
Metadata of safetensors, at the beginning of the file, contain it, too."""

_METADATA = {"pytest_gpumem": _MARK.decode()}

_LOOKED_AT = 1 << 24
"""Bytes that are read of a file, which begins with its pickle."""


@contextmanager
def checkpoints_kept(note: Callable[[str], None]) -> Iterator[None]:
    """Keep ``torch.save`` and safetensors inside from writing shapes over a file that holds values.

    A distributed checkpoint is not written to a folder that holds one with values either. ``note``
    is called with a sentence for each.
    """
    save = torch.save
    prepare = FileSystemWriter.prepare_local_plan
    elsewhere: list[tempfile.TemporaryDirectory[str]] = []

    def preparing(writer: FileSystemWriter, plan: Any) -> Any:
        folder = Path(writer.path)
        if any(not _has_no_values(part) for part in folder.glob("*.distcp")):
            elsewhere.append(tempfile.TemporaryDirectory())
            writer.path = Path(elsewhere[-1].name)
            note(
                f"a distributed checkpoint at {user_line()} has left {folder.name} as it was: a "
                "simulated GPU has shapes to write, and no values"
            )
        return prepare(writer, plan)

    @functools.wraps(save)
    def keeping(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, (str, os.PathLike)) else None
        if path is None or not path.is_file() or _has_no_values(path):
            save(obj, f, *args, **kwargs)
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            save(obj, new, *args, **kwargs)
            if not _has_no_values(new):
                new.replace(path)
                return
        note(
            f"torch.save at {user_line()} has left {path.name} as it was: a simulated GPU has "
            "shapes to write, and no values"
        )

    def serializing(serialize: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(serialize)
        def call(tensors: Any, filename: Any, metadata: Any = None) -> None:
            if not gives_no_values():
                serialize(tensors, filename, metadata=metadata)
                return
            path = Path(filename)
            if not path.is_file() or _has_no_values(path):
                serialize(tensors, filename, metadata={**(metadata or {}), **_METADATA})
                return
            note(
                f"safetensors at {callers_line()} has left {path.name} as it was: a simulated GPU "
                "has shapes to write, and no values"
            )

        return call

    with pytest.MonkeyPatch.context() as patches:
        if find_spec("safetensors") is not None:
            module = importlib.import_module("safetensors.torch")
            patches.setattr(module, "serialize_file", serializing(module.serialize_file))
        for place in (torch, torch.serialization):
            patches.setattr(place, "save", keeping)
        patches.setattr(FileSystemWriter, "prepare_local_plan", preparing)
        try:
            yield
        finally:
            for folder in elsewhere:
                folder.cleanup()


def _has_no_values(path: Path) -> bool:
    with path.open("rb") as file:
        return _MARK in file.read(_LOOKED_AT)
