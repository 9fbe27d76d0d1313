"""Helpers of every layer: they use torch and Python, and no GPU.

May use: nothing. True properties of tensors, places in the code, and attributes that are replaced
for a while.
"""
