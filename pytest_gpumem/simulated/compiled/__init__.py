"""``torch.compile``: Inductor's own wrapper of a graph, run for its allocations.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``. Dynamo, AOTAutograd and Inductor are torch's own and see torch as it is, but for the
tensors (``fakes``), the GPU's properties and Triton (``tracing``). They make a module of
Python that allocates, launches and frees; ``wrapper`` gives it kernels that do nothing.
``backend`` passes a graph through them, and ``entry`` replaces ``torch.compile``.
"""
