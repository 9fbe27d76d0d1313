"""Predictions of a program's memory: closed forms, and runs on simulated GPUs."""
