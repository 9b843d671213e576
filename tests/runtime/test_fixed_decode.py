"""Decoding in batches of fixed size, as inside a captured graph, gives what the dense loop gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrel.runtime.decode import FixedDecode
from kestrel.runtime.sampler import Sampled
from kestrel.settings import SamplingParams
from kestrel.tokens import TextToken, Token
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.moondream.goldens import FAMILIES
from tests.moondream.grammars import text_grammar
from tests.runtime.paged import Case, paged
from tests.runtime.test_paged_equality import all_skills, dense


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, batch size) of every step that ran in a fixed size."""
    seen: list[tuple[int, int]] = []
    run: Callable[..., Sampled] = FixedDecode.run

    def noted(self: FixedDecode, decode: list[Any], parts: Any) -> Sampled:
        seen.append((len(decode), self.size_for(len(decode))))
        return run(self, decode, parts)

    monkeypatch.setattr(FixedDecode, "run", noted)
    return seen


@sweep(("family", "steps_in_flight"), [("md2", 1), ("md3", 0)], always=[("md3", 0)])
def test_every_skill_in_one_batch_equals_the_dense_loop(
    family: str, steps_in_flight: int, sizes: list[tuple[int, int]]
) -> None:
    g = coarse(family)
    cases = all_skills(g, "a", "small") + all_skills(g, "b", "multi")
    engine = paged(g.model, steps_in_flight=steps_in_flight, in_fixed_sizes=True)
    assert engine.run(*cases) == dense(g, cases)
    assert any(rows < size for rows, size in sizes), "some batch was filled up"


@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_as_likely_as_in_the_dense_loop(family: str) -> None:
    """Log-probabilities are no part of a token's identity, so no other test compares them."""
    g = coarse(family)
    cases = all_skills(g, "a", "small")
    expected = likelihoods(dense(g, cases))
    assert min(expected.values()) < -0.1
    for in_fixed_sizes in (False, True):
        found = likelihoods(paged(g.model, in_fixed_sizes=in_fixed_sizes).run(*cases))
        assert found == pytest.approx(expected, abs=1e-4)


def likelihoods(said: dict[str, list[Token]]) -> dict[tuple[str, int], float]:
    return {
        (name, index): token.logprob
        for name, tokens in said.items()
        for index, token in enumerate(tokens)
        if not isinstance(token, TextToken)
    }


@sweep("family", FAMILIES, always=["md3"])
def test_filling_up_a_batch_changes_nothing_for_a_row_alone(family: str, sizes: list[tuple[int, int]]) -> None:
    g = coarse(family)
    for case in all_skills(g, "a", "small"):
        assert paged(g.model, in_fixed_sizes=True, page_size=7).run(case) == dense(g, [case])
    assert {size for _, size in sizes} == {1}


def test_draws_and_wishes_about_the_end_are_those_of_the_usual_step(sizes: list[tuple[int, int]]) -> None:
    g = coarse("md3")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    wishes = {
        "drawn": SamplingParams(max_new_tokens=12, temperature=1.5, seed=5),
        "narrow": SamplingParams(max_new_tokens=12, temperature=2.0, top_k=5, top_p=0.9, seed=6),
        "greedy": SamplingParams(max_new_tokens=12),
        "long": SamplingParams(max_new_tokens=12, min_tokens=12, ignore_eos=True),
        "stops": SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(60, 90))),
    }
    cases = [Case(name, items, text_grammar(g.config), 12, {}, how) for name, how in wishes.items()]
    usual = paged(g.model).run(*cases)
    assert len(set(map(str, usual.values()))) > 2
    assert paged(g.model, in_fixed_sizes=True).run(*cases) == usual
    assert len(sizes) > 5


def test_wishes_about_scores_are_those_of_the_usual_step(sizes: list[tuple[int, int]]) -> None:
    g = coarse("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    wishes = {
        "scored": SamplingParams(max_new_tokens=6, logprobs=2),
        "penalised": SamplingParams(max_new_tokens=6, frequency_penalty=1.5),
        "biased": SamplingParams(max_new_tokens=6, logit_bias=((70, 50.0),)),
        "limited": SamplingParams(max_new_tokens=6, allowed_ids=tuple(range(40, 200))),
        "suppressed and drawn": SamplingParams(6, temperature=1.1, seed=3, suppressed_ids=tuple(range(0, 90, 2))),
        "plain": SamplingParams(6),
    }
    cases = [Case(name, items, text_grammar(g.config), 6, {}, how) for name, how in wishes.items()]
    usual = paged(g.model).run(*cases)
    assert len(set(map(str, usual.values()))) >= len(cases) - 1, "scored and plain ones say the same"
    assert paged(g.model, in_fixed_sizes=True).run(*cases) == usual
    for case in cases:
        assert paged(g.model, in_fixed_sizes=True).run(case) == {case.name: usual[case.name]}
    assert len(sizes) > 5


def test_a_row_that_had_wishes_about_its_end_leaves_none_to_the_next() -> None:
    g = coarse("md2")
    items, _ = g.naive.context(None, g.naive.query_items("what is the cat?", [], False))
    engine = paged(g.model, in_fixed_sizes=True, max_batch_size=2)
    plain = Case("plain", items, text_grammar(g.config), 9)
    expected = dense(g, [plain])["plain"]
    stops = tuple({token.id for token in expected})
    engine.run(Case("stops", items, text_grammar(g.config), 9, {}, SamplingParams(9, stop_token_ids=stops)))
    other = Case("other", items, text_grammar(g.config), 9, {}, SamplingParams(9, min_tokens=3))
    assert engine.run(plain, other)["plain"] == expected
