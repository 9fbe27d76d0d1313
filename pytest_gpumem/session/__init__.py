"""The pytest session: which tests are measured, the course of one test, and the results of all.

``session`` is one run, ``item`` one test of it, and ``results`` their outcomes. Some names of
this package, which is large:

- *affinity*: a shared fixture belongs to the device that it was set up on.
- *placement*: the device of this process; ``host`` is about those of this machine, and ``hosts``
  about messages of workers on several machines to their controller.
- *passage*: a test's way through the gate where devices are shared; *yielding*: it makes room.
- *foresight*: unknown needs are simulated before anything runs; ``ahead`` only imports.
- *second run*: of a test that needs real values, on the CPU; *rerun*: after a failure, by a plugin.
"""
