"""The output of a run: terminal section, JSON report, JUnit properties."""
