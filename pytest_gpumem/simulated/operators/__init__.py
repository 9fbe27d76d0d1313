"""Allocations of CUDA operators, by family; ``tables`` puts the families together.

May use: ``common``, ``gpu``, ``machine``. A rule takes its device as the argument ``gpu``.
``custom_kernels`` imports no torch.

How CUDA runs an operator decides which table has it:

- ``RULES``: one kernel, with temporaries around its outputs; by the operator's name;
- ``ABOVE_AUTOGRAD``: several operators, which autograd records one by one;
- ``BELOW_AUTOGRAD``: several operators, which autograd records as one. Convolutions are here:
  ``convolution_choice`` finds the kernel, ``cudnn`` its workspace;
- ``PARTS``: several operators in some calls only (``sparse``), for a Python number
  (``comparisons``), or for an operator that is not torch's (``below_autograd``).
"""
