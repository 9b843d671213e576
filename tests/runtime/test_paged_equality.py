"""The paged, batched path gives what the plain dense loop gives: alone, among strangers, cached, chunked, preempted."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel.runtime.contract import POSITIONS_PER_CROP
from kestrel.settings import SamplingParams
from kestrel.tokens import TextToken, Token
from tests.exhaustive import sweep
from tests.kernels.page_orders import head_major
from tests.moondream.coarse import POSITIONS, coarse
from tests.moondream.goldens import FAMILIES, Golden, golden, pixels
from tests.moondream.grammars import objects_grammar, reasoning_grammar, text_grammar
from tests.moondream.naive import NaiveMoondream
from tests.runtime.paged import Case, Paged, paged

FULL_SIZE = 731
"""Positions of a step that a picture of a golden model just fits."""


def all_skills(g: Golden, tag: str, picture: str = "small") -> list[Case]:
    """One case per skill, all about one picture."""
    naive, config = g.naive, g.config
    text, reasoning = text_grammar(config), reasoning_grammar(config)
    refs = [[0.25, 0.75], [0.125, 0.25, 0.5, 0.875]]
    caption = config.tokenizer.templates["caption.short"].prefix
    parts = {
        "query": (naive.query_items("what is the cat?", [], False), text, 10),
        "refs": (naive.query_items("what is the cat?", refs, False), text, 6),
        "reason": (naive.query_items("what is the cat?", [], True), reasoning, 5),
        "caption": ([TextToken(i) for i in caption], text, 8),
        "point": (naive.object_items("point", "dog"), objects_grammar(config, with_size=False), 8),
        "detect": (naive.object_items("detect", "dog"), objects_grammar(config, with_size=True), 9),
    }
    cases = []
    for name, (items, grammar, budget) in parts.items():
        context, images = naive.context(pixels(picture), items)
        cases.append(Case(f"{tag}.{name}", context, grammar, budget, images))
    context, images = naive.context(None, naive.query_items("what is the cat?", [], False))
    return [*cases, Case(f"{tag}.text", context, text, 9, images)]


SAID: dict[tuple[Any, ...], list[Token]] = {}
"""What the dense loop says, by its model and the question: many tests ask the same."""


def dense(g: Golden, cases: list[Case]) -> dict[str, list[Token]]:
    return {case.name: said_by(g.naive, case) for case in cases}


def said_by(naive: NaiveMoondream, case: Case) -> list[Token]:
    asked = (naive, tuple(case.items), case.grammar, case.max_new_tokens)
    if asked not in SAID:
        SAID[asked] = naive.generate(case.items, case.images, case.grammar, case.max_new_tokens).tokens
    return SAID[asked]


# Every pair of family, page size and steps; all three together have nothing of their own.
@sweep(
    ("family", "page_size", "steps_in_flight"),
    [("md2", 1, 0), ("md2", 16, 1), ("md2", 64, 0), ("md3", 1, 1), ("md3", 16, 0), ("md3", 64, 1)],
    always=[("md3", 64, 1)],
)
def test_every_skill_in_one_batch_equals_the_dense_loop(family: str, page_size: int, steps_in_flight: int) -> None:
    g = golden(family)
    cases = all_skills(g, "a", "small") + all_skills(g, "b", "multi")
    engine = paged(g.model, page_size=page_size, steps_in_flight=steps_in_flight)
    assert engine.run(*cases) == dense(g, cases)


@sweep("family", FAMILIES, always=["md3"])
def test_alone_and_after_a_prefix_hit(family: str) -> None:
    g = golden(family)
    cases = all_skills(g, "a", "multi")
    expected = dense(g, cases)
    engine = paged(g.model)
    for case in cases:
        update = engine.finish(case)[case.name]
        assert update.output is not None
        assert update.output.fields["tokens"] == expected[case.name]
        assert update.metrics is not None
        has_picture = bool(case.images)
        assert (update.metrics.cached_tokens >= 730) == (has_picture and case is not cases[0])


@pytest.mark.parametrize("by_kernels", [False, True])
def test_pages_may_lie_head_by_head(by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU, through all operations of the plain bundle."""
    monkeypatch.setattr("kestrel.runtime.attention.as_pages", head_major)
    g = coarse("md2")
    cases = all_skills(g, "a", "small")
    engine = paged(g.model, page_size=4, is_fused=by_kernels, in_fixed_sizes=by_kernels)
    assert engine.run(*cases[:1]) | engine.run(*cases[1:]) == dense(g, cases)


@pytest.mark.parametrize(("family", "steps_in_flight"), [("md2", 0), ("md3", 1)])
def test_pictures_in_slices_while_others_are_read_along(family: str, steps_in_flight: int) -> None:
    g = coarse(family)
    cases = [*all_skills(g, "a", "small")[-1:], *all_skills(g, "b", "multi")[:2], *all_skills(g, "c", "small")[3:5]]
    engine = paged(g.model, streaming_prefill_tokens=POSITIONS_PER_CROP, steps_in_flight=steps_in_flight)
    assert engine.run(*(replace(case, is_streaming=True) for case in cases)) == dense(g, cases)


@pytest.mark.parametrize("family", FAMILIES)
@sweep("budget", [1, 7, POSITIONS + 1, FULL_SIZE], always=[7, FULL_SIZE])
def test_chunked_prefill(family: str, budget: int) -> None:
    g = golden(family) if budget == FULL_SIZE else coarse(family)
    cases = all_skills(g, "a", "small")
    assert paged(g.model, max_prefill_tokens=budget).run(*cases) == dense(g, cases)


@sweep(("family", "steps_in_flight"), [("md2", 0), ("md2", 1), ("md3", 0), ("md3", 1)], always=[("md2", 0), ("md3", 1)])
def test_after_preemption_and_recompute(family: str, steps_in_flight: int) -> None:
    g = golden(family)
    cases = [case for case in all_skills(g, "a", "small") if case.images]
    longest = max(sum(getattr(i, "num_positions", 1) for i in case.items) + 2 * case.max_new_tokens for case in cases)
    pages = -(-longest // 4) + 8
    engine = paged(g.model, page_size=4, num_pages=pages, steps_in_flight=steps_in_flight)
    final = engine.finish(*cases)
    assert sum(u.metrics.num_preemptions for u in final.values() if u.metrics) > 0
    expected = dense(g, cases)
    assert {name: u.output.fields["tokens"] for name, u in final.items() if u.output} == expected


@sweep("family", FAMILIES, always=["md3"])
def test_without_prefix_cache(family: str) -> None:
    g = coarse(family)
    cases = all_skills(g, "a", "small")
    assert paged(g.model, prefix_cache=False).run(*cases) == dense(g, cases)


@sweep("family", FAMILIES, always=["md3"])
def test_several_pictures_in_one_context(family: str) -> None:
    """Each picture is bidirectional in itself; text between them stays causal."""
    g = golden(family)
    first, images = g.naive.context(pixels("small"), g.naive.query_items("one", [], False))
    digest = hashlib.sha256(b"second").hexdigest()
    span = type(first[0])(digest, 50, None)
    images = images | {digest: pixels("multi")}
    # The second picture is cut to 50 positions: the small context has no room for two whole ones.
    g.naive.image_cache[digest] = g.naive.embed_image("full", pixels("multi"))[:50]
    items = [*first, span, *g.naive.query_items("two", [], False)]
    case = Case("two", items, text_grammar(g.config), 6, images)
    expected = g.naive.generate(items, images, case.grammar, 6).tokens
    engine = paged(g.model)
    whole = engine.decoder.vision.embed_images
    engine.decoder.vision.embed_images = lambda prepared, encode_crops: [
        embedded if image.num_crops == 1 else embedded[:50]
        for image, embedded in zip(prepared, whole(prepared, encode_crops), strict=True)
    ]
    assert engine.run(case)["two"] == expected


@sweep("family", FAMILIES, always=["md2"])
def test_logits_stay_within_the_golden_tolerance(family: str) -> None:
    g = golden(family)
    engine = paged(g.model)
    for case in all_skills(g, "a", "multi"):
        expected = g.naive.generate(case.items, case.images, case.grammar, case.max_new_tokens)
        engine.decoder.logits_seen.clear()
        engine.run(case)
        seen = torch.cat(engine.decoder.logits_seen)
        dense_logits = torch.stack([step.logits_V for step in expected.steps])[: len(seen)]
        torch.testing.assert_close(seen, dense_logits, atol=1e-4, rtol=0)


@sweep("family", FAMILIES, always=["md3"])
def test_seeded_sampling_is_the_same_in_any_company(family: str) -> None:
    g = coarse(family)
    base = all_skills(g, "s", "small")[0]

    def drawn(name: str, seed: int) -> Case:
        sampling = SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.95, seed=seed)
        return Case(name, base.items, base.grammar, 12, base.images, sampling)

    alone = paged(g.model).run(drawn("x", 11))["x"]
    assert paged(g.model).run(drawn("x", 11))["x"] == alone
    crowd = paged(g.model).run(drawn("y", 12), drawn("x", 11), *all_skills(g, "a", "multi"), drawn("z", 13))
    assert crowd["x"] == alone
    assert len({tuple(crowd[name]) for name in "xyz"}) == 3
    tight = paged(g.model, page_size=4, num_pages=55, steps_in_flight=1)
    final = tight.finish(drawn("x", 11), drawn("y", 12), drawn("z", 13))
    assert final["x"].output is not None
    assert final["x"].output.fields["tokens"] == alone


def test_logprobs_are_the_models_own() -> None:
    g = coarse("md2")
    base = all_skills(g, "p", "small")[0]
    case = Case("p", base.items, base.grammar, 4, base.images, SamplingParams(max_new_tokens=4, logprobs=3))
    engine = paged(g.model)
    seen = []
    request = case.request()
    consume = request.consumer.consume
    request.consumer.consume = lambda token, logprobs: (seen.append((token, logprobs)), consume(token, logprobs))[1]
    engine.scheduler.add(request)
    while engine.scheduler.has_work:
        engine.scheduler.step()
    assert len(seen) == 4
    for (token, logprobs), logits in zip(seen, torch.cat(engine.decoder.logits_seen), strict=True):
        expected = torch.log_softmax(logits, -1)
        assert len(logprobs.top) == 3
        assert logprobs.chosen == pytest.approx(expected[token.id].item(), abs=1e-5)
        assert logprobs.top[0][1] == pytest.approx(expected.max().item(), abs=1e-5)


def test_a_requests_own_id_limits_hold() -> None:
    g = coarse("md2")
    base = all_skills(g, "p", "small")[0]

    def limited(name: str, **limits: tuple[int, ...]) -> Case:
        return Case(name, base.items, base.grammar, 6, base.images, SamplingParams(max_new_tokens=6, **limits))

    engine: Paged = paged(g.model)
    free = engine.run(limited("free"))["free"]
    first = free[0].id
    final = engine.run(limited("without", suppressed_ids=(first,)), limited("only", allowed_ids=(40, 41)))
    assert TextToken(first) not in final["without"]
    assert {token.id for token in final["only"]} <= {40, 41}
    assert engine.run(limited("again"))["again"] == free
