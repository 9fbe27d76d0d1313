"""A training or inference script, as it is, on a device: measured for some steps, then stopped.

``entry`` runs it as ``python`` would, ``stopping`` ends it, ``phases`` says which iteration memory
belongs to, and ``measured`` puts these together. Each run has a process of its own: ``child`` is
that, ``request`` what goes in and comes out, and ``process`` starts it, again where one run does
not tell enough. ``kept`` runs a script in a test.

``files`` keeps it from writing shapes over a checkpoint.

Only ``stopping``, ``phases``, ``files``, ``measured`` and ``child`` import torch.
"""
