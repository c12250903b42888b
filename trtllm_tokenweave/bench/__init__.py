"""Benchmarks of the kernel on several GPUs, and the plots of their results (PyTorch is needed to measure)."""
