"""Benchmarks for tests of what they count and write, not of how fast anything is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kestrel.bench import engine
from kestrel.moondream import random_models
from tests.moondream.coarse import coarse_tiny_parts


@contextmanager
def quick_benchmarks() -> Iterator[None]:
    """The tiny random model has a coarse look, and nobody looks for garbage between cases: in a process that has
    imported all that tests do, each time takes 200 ms and more."""
    no_collector = SimpleNamespace(collect=_nothing, freeze=_nothing, unfreeze=_nothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_models, "tiny_random_parts", coarse_tiny_parts)
        patch.setattr(engine, "gc", no_collector)
        yield


def _nothing() -> None:
    pass
