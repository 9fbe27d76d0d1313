"""Measurement of a test's effect on GPU memory, from clean start to record.

The ``meter`` reads the device's counters at the start and end of each of the ``phases``. The
``observer`` records the addresses of tensors and the running modules. A ``composition`` combines
both: the holders of the bytes at the peak. A *recorder* reads the allocator's events and blocks.
"""
