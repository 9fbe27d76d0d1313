"""The pytest session: which tests are measured, one test on its way, and what came of all.

``session`` is one run, ``item`` one test of it, and ``results`` what came of them. Some names of
this room, which is large:

- *affinity*: a shared fixture belongs to the device that it was set up on.
- *placement*: the device of this process; ``host`` is about those of this machine, and ``hosts``
  about what workers on several machines tell their controller.
- *passage*: a test's way through the gate where devices are shared; *yielding*: it makes room.
- *foresight*: needs that nobody knows are simulated before anything runs; ``ahead`` only imports.
- *second run*: of a test that needs real values, on the CPU; *rerun*: after a failure, by a plugin.
"""
