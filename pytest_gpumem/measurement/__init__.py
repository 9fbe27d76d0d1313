"""What a test did to GPU memory, from clean start to record.

The ``meter`` reads the device's counters at the borders of ``phases``. The ``witness`` watches the
test meanwhile: whose tensors lie where, which module runs when. A ``composition`` is what comes of
both: who held the bytes at the peak. An *account* is what the meter keeps for one test.
"""
