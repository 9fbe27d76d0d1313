"""An unchanged training or inference script on a device: measured for some steps, then stopped.

``entry`` runs it as ``python`` would, also in tests; ``stopping`` ends it; ``measured`` assigns
memory to its iterations and keeps tensors without values from overwriting a checkpoint. Each run is
a separate process, in which ``measured`` runs; ``process`` starts it, and repeats it if necessary.

Only ``stopping`` and ``measured`` import torch.
"""
