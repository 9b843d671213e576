"""An engine with the embedded model, as the server has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def tiny_engine() -> AsyncIterator[InferenceEngine]:
    config = RuntimeConfig(device="cpu", kv_cache_pages=600, max_batch_size=4)
    async with await InferenceEngine.create(config) as engine:
        yield engine
