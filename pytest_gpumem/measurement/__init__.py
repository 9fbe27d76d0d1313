"""What a test did to GPU memory, from clean start to record."""
