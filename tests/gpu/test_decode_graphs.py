"""Captured decode steps give what the usual step gives, on the GPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kestrel.cache import CacheManager
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.models.contract import DecoderModel
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.bring_up import batch_sizes
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode import DecodeGraphs
from kestrel.runtime.executor import Executor, FastSteps
from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from kestrel.scheduler import GenerationScheduler
from kestrel.settings import SamplingParams
from kestrel.tokens import ImageSpan
from tests.moondream.goldens import FAMILIES, golden
from tests.moondream.grammars import text_grammar
from tests.runtime.paged import Case, Paged, RecordingDecoder, noted_pictures_ahead
from tests.runtime.test_paged_equality import all_skills
from tests.runtime.test_sampling_options import OPTIONS

pytestmark = pytest.mark.gpu


def on_gpu(
    family: str, ops: Ops | None, *, is_fused: bool = False, max_batch_size: int = 16, pictures_ahead: int = 0
) -> Paged:
    """With captured steps over these operations, or, without any, with the usual steps."""
    model = copy.deepcopy(golden(family).model).to("cuda")
    limits = RuntimeLimits(
        max_batch_size=max_batch_size,
        max_seq_length=model.config.text.max_context,
        num_pages=900,
        page_size=16,
        max_prefill_tokens=2048,
        steps_in_flight=1,
        pictures_ahead=pictures_ahead,
    )

    def make(decoder: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        assert ops is not None
        pool = GraphPool(decoder.device)
        prefill = PrefillGraphs(decoder, kv, table, ops, 2048, pool) if is_fused else None
        return FastSteps(DecodeGraphs(decoder, kv, table, ops, batch_sizes(16, filled_up=int), pool), prefill)

    decoder = RecordingDecoder(model)
    if is_fused and ops is not None:
        decoder.fuse(ops)
    with torch.inference_mode():
        runtime = Executor(
            decoder, limits, make_fast_steps=None if ops is None else make, ops=ops or PLAIN, by_kernels=is_fused
        )
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, 16, True)), decoder)


def with_own_picture(case: Case) -> Case:
    """Which no other request leaves in the prefix cache."""
    items = [
        replace(item, digest=f"{item.digest} of {case.name}") if isinstance(item, ImageSpan) else item
        for item in case.items
    ]
    return replace(case, items=items, images={f"{digest} of {case.name}": of for digest, of in case.images.items()})


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_pictures_encoded_beside_decoding_give_the_same_answers(
    max_batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a second stream: what is read too early, or written over too early, shows now and then only."""
    ahead = noted_pictures_ahead(monkeypatch)
    g = golden("md2")
    crowd = [case for n in range(6) for case in all_skills(g, f"{n}", ("small", "multi")[n % 2])[2:5]]
    cases = [with_own_picture(case) for case in crowd]
    usual = on_gpu("md2", PLAIN, max_batch_size=max_batch_size).run(*cases)
    engine = on_gpu("md2", PLAIN, max_batch_size=max_batch_size, pictures_ahead=max_batch_size)
    assert engine.run(*cases) == usual
    assert ahead, "none was encoded ahead"


def test_captured_plain_steps_equal_the_usual_ones() -> None:
    cases = all_skills(golden("md2"), "a", "small") + all_skills(golden("md2"), "b", "multi")
    assert on_gpu("md2", PLAIN).run(*cases) == on_gpu("md2", None).run(*cases)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_triton_kernels_equal_the_plain_model(family: str) -> None:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - needs a GPU

    cases = all_skills(golden(family), "a", "small") + all_skills(golden(family), "b", "multi")
    assert on_gpu(family, TRITON, is_fused=True).run(*cases) == on_gpu(family, None).run(*cases)


def test_draws_and_late_grammars_are_those_of_the_usual_step() -> None:
    g = golden("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    drawn = [
        Case(f"d{n}", items, text_grammar(g.config), 20, {}, SamplingParams(20, temperature=1.5, seed=n))
        for n in range(5)
    ]
    engine, usual = on_gpu("md2", PLAIN), on_gpu("md2", None)
    assert engine.run(*drawn) == usual.run(*drawn)
    later = all_skills(g, "later", "small")
    assert engine.run(*later) == usual.run(*later), "grammars that came after the first capture"


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_wishes_about_scores_are_those_of_the_usual_step(temperature: float) -> None:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - needs a GPU

    g = golden("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    limits = {
        "limited": {"allowed_ids": tuple(range(40, 200))},
        "suppressed": {"suppressed_ids": tuple(range(0, 90, 2))},
    }
    options = {**OPTIONS, **limits, "scored": {"logprobs": 3}, "plain": {}}

    def crowd(tag: str) -> list[Case]:
        how = {name: SamplingParams(12, **wishes, temperature=temperature, seed=7) for name, wishes in options.items()}
        return [Case(f"{tag}{name}", items, text_grammar(g.config), 12, {}, one) for name, one in how.items()]

    usual = {name[1:]: tokens for name, tokens in on_gpu("md2", None).run(*crowd("u")).items()}
    for ops in (PLAIN, TRITON):
        engine = on_gpu("md2", ops)
        for tag in "abc":  # launched, then captured, then replayed
            assert {name[1:]: tokens for name, tokens in engine.run(*crowd(tag)).items()} == usual, (ops is PLAIN, tag)
