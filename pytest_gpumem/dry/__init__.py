"""The dry device: torch's own CUDA code on a machine without a GPU.

The CUDA build of torch runs unmodified over a runtime that stands in for NVIDIA's libraries;
docs/dry.md describes its limits.

The runtime is C in ``source/``, compiled by the machine's ``cc`` once for each build of torch
(:mod:`~pytest_gpumem.dry.build`) and loaded before torch is imported
(:mod:`~pytest_gpumem.dry.load`). Any script runs on it from a shell::

    python -m pytest_gpumem.dry SCRIPT [ARGUMENTS]
    python -m pytest_gpumem.dry --gpu H100*2 SCRIPT
    python -m pytest_gpumem.dry -m MODULE
    python -m pytest_gpumem.dry -c CODE
    eval "$(python -m pytest_gpumem.dry --print-environment)"   # then python, pytest, torchrun, ...

The last command sets ``LD_LIBRARY_PATH`` and ``LD_PRELOAD`` for all programs that the shell starts.
"""
