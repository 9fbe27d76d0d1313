"""The simulated CUDA device, in layers; each may use those above it in this list.

========== =====================================================================================
common     true properties of tensors, source lines, replaced names
gpu        one device: catalogue, memory, workspaces, estimates
machine    the state of a machine: devices, storages, values, streams, graphs, pools
operators  allocations of CUDA's operators, by family
execution  the dispatch mode that runs operators by their shapes
surface    names of torch's that are replaced, each by a translation to the machine
compiled   torch.compile: Inductor's own wrapper, run for its allocations
stand_ins  flash-attn where it is not installed, by the allocations of its functions
distributed  one rank of several: process groups and collectives without the other ranks
========== =====================================================================================

``simulation`` puts them together. All of them may use the rooms ``allocator`` and ``values``.
"""
