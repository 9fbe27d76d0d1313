"""Values beside shapes: which are known, what is taken for granted of others, what a read yields.

May use what ``machine`` may. ``neutral`` imports no torch.
"""
