"""A stand-in for flash-attn where it is not installed, with the allocations of its functions.

May use: ``common``, ``gpu``, ``machine``, ``operators``, ``execution``,
``surface``, ``compiled``. ``imports`` describes the library and lets code import it
while a simulation is active, and the folder ``flash_attn`` holds its functions.
"""
