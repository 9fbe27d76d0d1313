"""What a run leaves for its readers: terminal section, JSON report, JUnit properties."""
