"""A training or inference script, as it is, on a device: measured for some steps, then stopped.

``entry`` runs it as ``python`` would, in tests too, ``stopping`` ends it, and ``measured`` assigns
memory to its iterations and prevents writing shapes over a checkpoint. Each run has a process of
its own: ``measured`` runs in it, and ``process`` starts it, again where one run does not suffice.

Only ``stopping`` and ``measured`` import torch.
"""
