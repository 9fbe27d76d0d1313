"""A training or inference script, as it is, on a device: measured for some steps, then stopped.

``entry`` runs it as ``python`` would, ``stopping`` ends it, ``phases`` says what belongs to which of
its iterations and ``measured`` puts these together. Each run has a process of its own: ``child`` is
that, ``process`` starts it and says how often. ``kept`` runs a script in a test.

A module that is named here, but for ``measured`` and ``child``, imports no torch.
"""
