"""Kernels on the CPU for operators that it does not have as CUDA has them; they compute values.

They use only torch, and signatures of its operators.
"""
