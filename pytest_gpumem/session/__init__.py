"""The pytest session: which tests are measured, one test on its way, and what came of all."""
