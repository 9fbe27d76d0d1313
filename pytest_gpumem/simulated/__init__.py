"""The simulated CUDA device."""
