"""Fixed decode steps whose ends and beginnings are Triton kernels give what the usual step gives."""

from __future__ import annotations

from tests.kernels.triton_mode import devices  # isort: skip - before any kernel

import copy
from dataclasses import replace

import pytest

from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.commit_ids import commit_ids
from kestrel.kernels.triton.row_tables import row_inputs
from kestrel.kernels.triton.sampling import best_ids, draw_ids
from kestrel.models.contract import DecoderModel
from kestrel.moondream.model import MoondreamModel
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.decode import FixedDecode
from kestrel.runtime.executor import FastSteps
from kestrel.runtime.rows import RowTable
from kestrel.settings import SamplingParams
from tests.moondream.coarse import coarse
from tests.moondream.grammars import text_grammar
from tests.runtime.paged import Case, Paged, RecordingDecoder, paged, paged_in_steps
from tests.runtime.test_paged_equality import all_skills

OPS = replace(PLAIN, best_ids=best_ids, draw_ids=draw_ids, commit_ids=commit_ids, row_inputs=row_inputs)


def model_on(device: str) -> MoondreamModel:
    return copy.deepcopy(coarse("md2").model).to(device)


def engine(device: str) -> Paged:
    decoder = RecordingDecoder(model_on(device))

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        return FastSteps(FixedDecode(model, kv, table, OPS, (1, 3, 8, 16)))

    return paged_in_steps(decoder, make)


@devices
@pytest.mark.exhaustive
def test_every_skill_equals_the_usual_step(device: str) -> None:
    cases = all_skills(coarse("md2"), "a", "small")
    assert engine(device).run(*cases) == paged(model_on(device)).run(*cases)


@pytest.mark.exhaustive
@devices
def test_draws_and_wishes_about_the_end_are_those_of_the_usual_step(device: str) -> None:
    g = coarse("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    wishes = {
        "drawn": SamplingParams(max_new_tokens=8, temperature=1.5, seed=5),
        "truncated": SamplingParams(max_new_tokens=8, temperature=1.5, seed=6, top_k=20, top_p=0.7),
        "greedy": SamplingParams(max_new_tokens=8),
        "long": SamplingParams(max_new_tokens=8, min_tokens=8, ignore_eos=True),
        "stops": SamplingParams(max_new_tokens=8, stop_token_ids=tuple(range(60, 90))),
    }
    cases = [Case(name, items, text_grammar(g.config), 8, {}, how) for name, how in wishes.items()]
    together = engine(device)
    usual = paged(model_on(device))
    assert together.run(*cases[2:]) == usual.run(*cases[2:])
    assert together.run(*cases) == usual.run(*cases)
