"""What a simulated machine knows, and nothing of how it is shown to the code under test.

May use: ``common``, ``gpu``. Devices, the current one of each thread,
storages and where they are, values, streams, events, graphs, pools, pinned memory, random state,
and the notes for whoever reads the numbers. No operator runs here, and nothing of torch's is
replaced.
"""
