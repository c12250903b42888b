"""Settings shared by all tests."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings
from support.fake_gpu import cuda, trt

__all__ = ["cuda", "trt"]  # fixtures

# Shared machines stall: a slow example is no bug. In CI the examples are the same on every run.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `mpi` where there is no mpirun."""
    if shutil.which("mpirun") is not None:
        return
    skip = pytest.mark.skip(reason="mpirun is not installed (apt-get install openmpi-bin libopenmpi-dev)")
    for item in items:
        if item.get_closest_marker("mpi") is not None:
            item.add_marker(skip)
