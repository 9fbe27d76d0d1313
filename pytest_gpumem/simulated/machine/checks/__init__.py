"""Arguments that CUDA's kernels refuse and meta kernels accept.

A meta kernel looks at shapes, and at types as far as its result depends on them. A program that no
GPU runs would pass on it, so types and devices are checked here, when an operator first meets
arguments of a new kind (see ``simulated/execution/shapes.py``).
"""
