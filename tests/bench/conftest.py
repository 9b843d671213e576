"""One thread, quick benchmarks for those who ask, and pictures that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from kestrel.bench.charts import chart_path

from .quick import quick_benchmarks

NUM_PICTURES = 32


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with quick_benchmarks():
        yield


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With small pictures in place of charts: one crop each instead of ten."""
    folder = tmp_path_factory.mktemp("charts")
    for number in range(NUM_PICTURES):
        Image.new("RGB", (300, 200), (8 * number, 100, 50)).save(chart_path(folder, number))
    return folder
