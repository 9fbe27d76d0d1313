"""Values on the dry device, where a test's control flow depends on them.

In a test's first run only copies write values to the device, and torch runs at full speed. If
control flow depends on another value, the test runs again and each operator is *followed*: after
torch's own code, the operator's CPU kernel computes the result in the memory of the device, by the
rules and limits of the simulated device's values. Torch's allocations do not change: the kernels
for following are registered at an unused dispatch key below autograd, without a dispatch mode.
"""
