"""Allocations of CUDA operators, by family; ``tables`` puts the families together.

May use: ``common``, ``gpu``, ``machine``. A rule is handed the device it is
about, and looks for none. ``described`` imports no torch.
"""
