"""One rank of several: ``torch.distributed`` in a process whose other ranks do not exist.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``, ``stand_ins``. ``process_groups`` makes groups for a rank without peers,
``collectives`` runs their operators, ``replacements`` raises errors where no world is given.
"""
