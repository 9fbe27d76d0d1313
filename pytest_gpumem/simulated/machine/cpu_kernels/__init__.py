"""CPU kernels of operators that only CUDA has, or has differently; they compute values.

They use only torch, and signatures of its operators.
"""
