"""Full-size Moondream 2 on a GPU keeps to the memory that was planned, whatever pictures and batches come."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import pytest
import torch

from kestrel.bench.engine import load_model
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ReadyModel, ready_from

pytestmark = pytest.mark.gpu

GIB = 2**30
SIDES = (60, 378, 700, 1100, 2000)


async def ask_in_batches(config: RuntimeConfig, ready: ReadyModel) -> None:
    dice = random.Random(2)
    async with InferenceEngine.start(config, ready) as engine:
        for count in (1, 3, 16, 7, 16, 2, 16, 16):
            pictures = [np.full((dice.choice(SIDES), dice.choice(SIDES), 3), dice.randrange(256), np.uint8)] * 2
            pictures += [
                np.full((dice.choice(SIDES), dice.choice(SIDES), 3), dice.randrange(256), np.uint8)
                for _ in range(count - 1)
            ]
            asked = (engine.query(image=p, question="what?", reasoning=False, max_tokens=4) for p in pictures)
            await asyncio.gather(*asked)


def test_no_more_memory_than_planned_is_taken() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    config = RuntimeConfig(device="cuda", max_batch_size=16)
    ready = ready_from(load_model(config, "MD2"), config)
    plan = ready.memory_plan
    assert plan is not None
    asyncio.run(ask_in_batches(config, ready))
    taken = torch.cuda.memory_reserved()
    print(f"\n{plan}; taken: {taken / GIB:.2f} GiB")
    assert plan.working_bytes < 8 * GIB, "a plan that is far too large would hold, and cost pages"
    assert taken <= plan.total_bytes
