"""A project whose functions cache whether there is a GPU: runs on both devices read it."""

from __future__ import annotations

CACHED = """
import functools
import pytest
import torch

@functools.lru_cache
def is_there():
    return torch.cuda.is_available()

@functools.cache
def by_another():
    return is_there()

class Facts:
    @staticmethod
    @functools.cache
    def count():
        return torch.cuda.device_count()

@functools.cache
def unconcerned():
    return object()

@functools.cache
def declared() -> "bool":
    return not torch.cuda.is_available()

runs = []

def once(function):
    @functools.cache
    @functools.wraps(function)
    def called():
        return function()
    return called

@once
def initialize():
    if torch.cuda.is_available() or not runs:
        runs.append("without a declaration")

@functools.cache
def initialize_declared() -> object:
    runs.append(torch.cuda.is_available())
    return runs

AT_IMPORT = is_there(), by_another(), unconcerned(), declared()
initialize()
initialize_declared()

def test_before():
    assert (is_there(), by_another()) == (False, False)

@pytest.mark.gpumem
def test_marked():
    torch.empty(1, device="cuda")
    assert (is_there(), by_another(), Facts.count(), declared()) == (True, True, 1, False)
    initialize()
    initialize_declared()
    assert runs == ["without a declaration", False]

def test_after():
    assert (is_there(), by_another()) == (False, False)
    assert unconcerned() is AT_IMPORT[2]
"""
