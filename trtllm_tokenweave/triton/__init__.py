"""Triton Inference Server: model repositories, the Python backend's model, and starting servers under mpirun."""
