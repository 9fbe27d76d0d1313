"""Baselines: what is stored, how a test is judged against it, what a session writes."""
