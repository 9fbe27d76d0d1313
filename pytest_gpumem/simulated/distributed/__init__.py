"""A rank of many: ``torch.distributed`` in a process whose other ranks do not exist.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``, ``stand_ins``. ``process_groups`` connects a rank with those that do not
exist, ``collectives`` runs their operators, ``replacements`` raises where no world is given.
"""
