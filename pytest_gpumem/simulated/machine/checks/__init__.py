"""What a GPU refuses: arguments on which CUDA's own kernels raise, and torch's words for it.

A meta kernel looks at shapes, and at types as far as its result depends on them. Everything that
the CUDA side of an operator checks besides stands here, evaluated where an operator meets
arguments of a new kind (see ``simulated/shapes.py``).
"""
