"""A rank of many: ``torch.distributed`` in a process whose other ranks do not exist.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``, ``stand_ins``. ``world`` holds rank, size and torchrun's variables,
``process_groups`` connects it with ranks that do not exist, ``collectives`` runs their operators,
``parts`` raises where a world is needed and none is given.
"""
