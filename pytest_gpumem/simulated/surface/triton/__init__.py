"""Triton on a simulated GPU: everything around a kernel runs, and the kernel itself does nothing.

A kernel allocates nothing: the Python code around it does. So what is allocated is exact without
any description, and memory that a kernel may have written is unknown from then on. ``launches``
replaces the launch, ``compiled`` the code, ``driver`` the driver of Triton's device, and
``stores`` reads in the source of a kernel which of its arguments it may write to.
"""
