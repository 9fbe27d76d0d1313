"""The state of a simulated machine; the layers above show it to the code under test.

May use: ``common``, ``gpu``. Devices, the current one of each thread, storages and their blocks,
values, streams, events, graphs, pools, pinned memory, random state and notes. This layer runs no
operator and replaces none of torch's names.
"""
