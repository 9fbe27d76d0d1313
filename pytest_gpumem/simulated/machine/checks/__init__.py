"""Arguments on which CUDA's kernels raise, and torch's words for each error.

A meta kernel looks at shapes, and at types as far as its result depends on them. Everything that
the CUDA side of an operator checks besides is checked here, when an operator first meets
arguments of a new kind (see ``simulated/shapes.py``).
"""
