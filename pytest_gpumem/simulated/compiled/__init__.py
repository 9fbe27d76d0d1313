"""``torch.compile``: Inductor's own wrapper of a graph, run for its allocations.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``. Dynamo, AOTAutograd and Inductor are torch's own and see torch as it is, but for the
tensors (``fakes``), the GPU they ask about and Triton (``tracing``). What they make is a module of
Python that allocates, launches and frees; ``wrapper`` is what it finds there: kernels that do
nothing. ``backend`` leads a graph through them, ``entry`` is what takes the place of
``torch.compile``.
"""
