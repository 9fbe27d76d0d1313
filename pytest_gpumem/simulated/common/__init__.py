"""Helpers of every layer: they know torch and Python, and of GPUs nothing.

May use: nothing. Errors, what tensors really are, where in the code something happens,
attributes that are replaced for a while. ``errors`` imports no torch.
"""
