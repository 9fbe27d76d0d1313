"""User code's view of CUDA: names of torch's that are replaced while a simulation is active.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``. Each
replacement is a thin translation to the machine; each module's ``add_patches`` adds its own.
"""
