"""Captured decode steps give what the usual step gives, on the GPU."""

from __future__ import annotations

import pytest
import torch

from kestrel.cache import CacheManager
from kestrel.kernels.paged_attention import attend_rows as plain_attend_rows
from kestrel.models.contract import DecoderModel
from kestrel.moondream.runtime import batch_sizes
from kestrel.request import SamplingParams
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode_graphs import DecodeGraphs
from kestrel.runtime.executor import Executor
from kestrel.runtime.fixed_decode import AttendRows
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable
from kestrel.scheduler import GenerationScheduler
from tests.moondream.goldens import FAMILIES, golden
from tests.moondream.grammars import text_grammar
from tests.runtime.paged import Case, Paged, RecordingDecoder
from tests.runtime.test_fixed_decode import rounded
from tests.runtime.test_paged_equality import all_skills

pytestmark = pytest.mark.gpu


def on_gpu(family: str, attend_rows: AttendRows | None) -> Paged:
    """With captured steps over the given attention, or with the usual ones."""
    model = golden(family).model.to("cuda")
    limits = RuntimeLimits(
        max_batch_size=16,
        max_seq_length=model.config.text.max_context,
        num_pages=900,
        page_size=16,
        max_prefill_tokens=2048,
        steps_in_flight=1,
    )

    def make(decoder: DecoderModel, kv: PagedKVCache, table: RowTable) -> DecodeGraphs:
        assert attend_rows is not None
        return DecodeGraphs(decoder, kv, table, attend_rows, batch_sizes(16))

    decoder = RecordingDecoder(model)
    with torch.inference_mode():
        runtime = Executor(decoder, limits, make_fixed_decode=None if attend_rows is None else make)
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, 16, True)), decoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_skill_in_one_batch_equals_the_usual_step(family: str) -> None:
    from kestrel.kernels.triton.paged_attention import attend_rows  # noqa: PLC0415 - needs a GPU

    g = golden(family)
    try:
        cases = all_skills(g, "a", "small") + all_skills(g, "b", "multi")
        usual = rounded(on_gpu(family, None).run(*cases))
        assert rounded(on_gpu(family, plain_attend_rows).run(*cases)) == usual
        assert rounded(on_gpu(family, attend_rows).run(*cases)) == usual
    finally:
        g.model.to("cpu")


def test_draws_and_late_grammars_are_those_of_the_usual_step() -> None:
    g = golden("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    drawn = [
        Case(f"d{n}", items, text_grammar(g.config), 20, {}, SamplingParams(20, temperature=1.5, seed=n))
        for n in range(5)
    ]
    try:
        engine, usual = on_gpu("md2", plain_attend_rows), on_gpu("md2", None)
        assert engine.run(*drawn) == usual.run(*drawn)
        later = all_skills(g, "later", "small")
        assert rounded(engine.run(*later)) == rounded(usual.run(*later)), "grammars that came after the first capture"
    finally:
        g.model.to("cpu")
