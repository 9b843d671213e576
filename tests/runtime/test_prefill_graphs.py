"""Prefill in captured forms gives what the dense loop gives; the capture itself is tested on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from kestrel.cache import CacheManager
from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import DecoderModel
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.executor import Executor, FastSteps
from kestrel.runtime.fixed_decode import FixedDecode
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from kestrel.scheduler import GenerationScheduler
from tests.moondream.goldens import golden
from tests.runtime.paged import Paged, RecordingDecoder
from tests.runtime.repeating_pool import RepeatingPool
from tests.runtime.test_paged_equality import all_skills, dense


def captured(family: str, pool: RepeatingPool, max_prefill_tokens: int) -> Paged:
    decoder = RecordingDecoder(copy.deepcopy(golden(family).model))
    decoder.fuse(PLAIN)
    decoder.capture_vision(20, pool)
    limits = RuntimeLimits(
        max_batch_size=16,
        max_seq_length=decoder.shape.max_context,
        num_pages=900,
        page_size=16,
        max_prefill_tokens=max_prefill_tokens,
        steps_in_flight=0,
    )

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        prefill = PrefillGraphs(model, kv, table, PLAIN, max_prefill_tokens, pool)
        return FastSteps(FixedDecode(model, kv, table, PLAIN, (1, 3, 8, 16)), prefill)

    with torch.inference_mode():
        runtime = Executor(decoder, limits, vision_batch_crops=20, make_fast_steps=make)
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, 16, True)), decoder)


@pytest.mark.parametrize(("family", "max_prefill_tokens"), [("md2", 2048), ("md3", 100)])
def test_every_skill_equals_the_dense_loop(family: str, max_prefill_tokens: int) -> None:
    g, pool = golden(family), RepeatingPool()
    cases = all_skills(g, "a", "small") + all_skills(g, "b", "multi")
    engine = captured(family, pool, max_prefill_tokens)
    assert engine.run(*cases) == dense(g, cases)
    captures = pool.num_captures
    assert captures > 1
    again = all_skills(g, "c", "small") + all_skills(g, "d", "multi")
    assert engine.run(*again) == dense(g, again)
    assert pool.num_captures - captures <= 2, "steps of the same form share their capture"
