"""One pytest session, and the steps of each test: prepare, run, judge, explain. Not public.

docs/how_a_test_runs.md describes each step. Terms of this package:

- *placement*: the choice of this process's device; ``hosts`` sends messages of workers on several
  machines to their controller.
- *admission*: a test's permission to use a shared device; *yielding*: freeing it for another test.
- *rerun*: any further run of a test; *second run*: one that computes real values on the CPU;
  *recorded run*: one of a failed test's body that records which objects hold the memory.
"""
