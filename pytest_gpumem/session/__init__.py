"""One pytest session, and each test's life in it: prepare, run, judge, explain. No interface.

docs/how_a_test_runs.md goes through it step by step. Names that need a word:

- *placement*: the device of this process; ``hosts`` has the messages of workers on several machines
  to their controller.
- *admission*: a test's permission to use a shared device; *yielding*: it makes room for another.
- *second run*: of a test that needs real values, on the CPU; *rerun*: any further run; *recorded
  run*: of a failed test's body, which says who held the bytes.
"""
