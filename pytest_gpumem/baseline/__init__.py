"""Baselines: stored numbers, the comparison of tests with them, and their update."""
