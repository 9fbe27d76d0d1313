"""Allocations of CUDA operators, by family; ``tables`` puts the families together.

May use: ``common``, ``gpu``, ``machine``. A rule is handed the device it is
about, and looks for none. ``custom_kernels`` imports no torch.

Which table has an operator depends on how CUDA runs it: ``RULES``, by its name, if one kernel has
temporaries around its outputs; ``ABOVE_AUTOGRAD`` if it is taken apart before autograd records it;
``BELOW_AUTOGRAD`` if autograd records it whole and it is built from others; ``PARTS`` if only some
calls are (``sparse``), it returns a number to Python (``comparisons``) or is not torch's
(``below_autograd``). Convolutions are in ``BELOW_AUTOGRAD``: ``convolution_choice`` finds the
kernel, ``cudnn`` its workspace.
"""
