"""CUDA libraries that are not installed: stand-ins that allocate what their functions do.

May use: ``allocator``, ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``. ``libraries`` is the table of what there is, ``imports`` lets code import
it while a simulation is active; each library has a module or folder of its own, whose ``MODULES``
are the library's.
"""
