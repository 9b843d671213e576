"""For all tests: workers that run side by side take one thread each, and so do the programs they start."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    # Where this is set, each program that a test starts would compile the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
