"""Allocations of CUDA operators, by family; ``tables`` puts the families together.

May use: ``common``, ``gpu``, ``machine``. A rule is handed the device it is
about, and looks for none. ``custom_kernels`` imports no torch.
"""
