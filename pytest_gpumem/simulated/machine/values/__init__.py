"""Values beside shapes: which are known, what is taken for granted of others, what a read yields.

``neutral`` imports no torch.
"""
