"""The state of a simulated machine; the layers above show it to the code under test.

May use: ``common``, ``gpu``. Devices, the current one of each thread,
storages and where they are, values, streams, events, graphs, pools, pinned memory, random state,
and the notes for readers of the numbers. This layer runs no operator and replaces none of torch's
names.
"""
