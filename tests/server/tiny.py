"""An engine with the embedded model, as the server has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine


@asynccontextmanager
async def tiny_engine() -> AsyncIterator[InferenceEngine]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        async with await InferenceEngine.create(
            RuntimeConfig(device="cpu", kv_cache_pages=600, max_batch_size=4)
        ) as engine:
            yield engine
    finally:
        torch.set_num_threads(num_threads)
