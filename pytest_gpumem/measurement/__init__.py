"""Measurement of a test's effect on GPU memory, from clean start to record.

The ``meter`` reads the device's counters at the borders of ``phases``. The ``observer`` observes
the running test: which tensors lie where, which module runs when. A ``composition`` combines
both: the holders of the bytes at the peak. A *recorder* is the meter's data on one test.
"""
