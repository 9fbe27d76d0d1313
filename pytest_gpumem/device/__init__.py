"""Devices that tests are measured on, and the environment that keys their numbers."""
