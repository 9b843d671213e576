"""Full-size Moondream 2 on a GPU keeps to the memory that was planned, whatever pictures and batches come."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kestrel.bench.engine import load_model
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ReadyModel, ready_from
from kestrel.runtime import bring_up, memory

pytestmark = pytest.mark.gpu

GIB = 2**30
SIDES = (60, 378, 700, 1100, 2000)


def pictures(dice: random.Random, count: int) -> list[np.ndarray]:
    return [np.full((dice.choice(SIDES), dice.choice(SIDES), 3), dice.randrange(256), np.uint8) for _ in range(count)]


async def ask_in_batches(config: RuntimeConfig, ready: ReadyModel) -> None:
    dice = random.Random(2)
    async with InferenceEngine.start(config, ready) as engine:
        for count in (1, 3, 16, 7, 16, 2, 16, 16):
            asked = (
                engine.query(image=picture, question="what?", reasoning=False, max_tokens=4)
                for picture in pictures(dice, count)
            )
            await asyncio.gather(*asked)


@pytest.fixture
def limit() -> Iterator[None]:
    """Whatever a test allows itself is allowed to the next ones again."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("settings", [{}, {"enable_cuda_graphs": False}, {"vision_batch_crops": 4}])
@pytest.mark.usefixtures("limit")
def test_requests_are_answered_within_the_planned_memory(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with 12 GiB, nearly all of them planned: more than that is refused by the allocator."""

    def free_of_12_gib(device: torch.device) -> int:
        return 12 * GIB - torch.cuda.memory_reserved(device)

    for module in (memory, bring_up):
        monkeypatch.setattr(module, "free_memory_bytes", free_of_12_gib)
    config = RuntimeConfig(device="cuda", max_batch_size=16, kv_cache_memory_fraction=0.98, **settings)  # type: ignore[arg-type]
    ready = ready_from(load_model(config, "MD2"), config)
    plan = ready.memory_plan
    assert plan is not None
    assert 10 * GIB < plan.total_bytes < 12.25 * GIB, "the cache is planned before the last small buffers are there"
    torch.cuda.set_per_process_memory_fraction(plan.total_bytes / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()
    asyncio.run(ask_in_batches(config, ready))
    print(f"\n{plan}; taken: {torch.cuda.max_memory_reserved() / GIB:.2f} GiB")
