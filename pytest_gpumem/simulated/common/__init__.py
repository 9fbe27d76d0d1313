"""Helpers of every layer: they use torch and Python, and no GPU.

May use: nothing. What tensors really are, where in the code something happens, attributes that are
replaced for a while.
"""
