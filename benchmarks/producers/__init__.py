"""Programs whose memory traces were recorded on real GPUs, written anew to run under simulation.

Each has the shapes, the order of operators and the lifetimes of the one that was recorded.
"""
