"""Tests that need GPUs: `python -m pytest tests/gpu` on a machine with one or more."""
