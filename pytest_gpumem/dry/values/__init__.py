"""Values on the dry device, where a test's control flow depends on them.

A first run of a test has the values that copies bring, and runs at torch's own speed. Where it
reads another number and decides by it, the test runs again, and each operator is followed on the
CPU: by its CPU kernel, on the memory of the device itself, by the rules and limits of the simulated
device's values. Torch's own code allocates as usual and is not affected: operators are followed
below autograd, at a dispatch key of its own, so that no dispatch mode is on.
"""
