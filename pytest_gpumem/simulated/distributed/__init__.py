"""One rank of many: ``torch.distributed`` as the rank finds it, alone in its process.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``, ``stand_ins``. ``world`` says which rank of how many and what torchrun
tells it, ``process_groups`` connects it with ranks that are not there, ``collectives`` runs what it
does with them, ``refusals`` names what needs a world where there is none.
"""
