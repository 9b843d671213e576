"""Outputs of prompts through the scheduler on the fake runtime, whose numbers are worked out here by hand."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.grammar import free_text
from kestrel.request import FinishReason, PromptOutputs, PromptReport, ScoredToken
from kestrel.scheduler.sequence import Stage
from kestrel.tokens import ContextItem, ImageSpan, TextToken, num_positions
from tests.exhaustive import given_examples
from tests.scheduler.harness import Recorder, by_hand, context_items, image, make, request, run, text, tokens_of

VOCAB = 40
BOTH = PromptOutputs(logprobs=2, pool_from=1)


def report_by_hand(items: list[ContextItem], asked: PromptOutputs) -> PromptReport:
    """From the definitions of the fake runtime: hidden state (running sum, position), likeliest id their sum."""
    values: list[int] = []
    scores: list[ScoredToken] = []
    for item in items:
        if isinstance(item, ImageSpan):
            values += [int(item.digest[:4], 16) + k for k in range(item.num_positions)]
            continue
        assert isinstance(item, TextToken)
        if values and asked.logprobs is not None:
            likeliest = (sum(values) + len(values) - 1) % VOCAB
            top = tuple(((likeliest + k) % VOCAB, -2.0 if k else -1.0) for k in range(asked.logprobs))
            is_likeliest = item.id == likeliest
            scores.append(ScoredToken(-1.0 if is_likeliest else -2.0, 1 if is_likeliest else 2, top))
        values.append(item.id)
    if asked.pool_from is None:
        return PromptReport([scores])
    pooled = range(asked.pool_from, len(values))
    sums = [float(sum(sum(values[: p + 1]) for p in pooled)), float(sum(pooled))]
    return PromptReport([scores], sums, len(pooled))


contexts = st.tuples(
    st.sampled_from(["none", "cat", "dog"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=20),
    st.sampled_from(["none", "late"]),
    st.lists(st.integers(1, 3), min_size=3, max_size=5),
)
wishes = st.sampled_from(
    [None, BOTH, PromptOutputs(logprobs=0), PromptOutputs(pool_from=0), PromptOutputs(logprobs=1, pool_from=3)]
)
calls = st.tuples(contexts, wishes, st.integers(0, 15), st.integers(-2, 2), st.integers(0, 3))


@given_examples(
    25,
    75,
    script=st.lists(calls, min_size=1, max_size=14),
    page_size=st.sampled_from([1, 3, 8]),
    pool=st.integers(60, 160),
    rows=st.integers(1, 5),
    budget=st.integers(1, 40),
    depth=st.integers(0, 1),
    prefix_cache=st.booleans(),
)
def test_every_report_and_answer_is_the_one_by_hand_in_any_traffic(
    script: list[tuple], page_size: int, pool: int, rows: int, budget: int, depth: int, prefix_cache: bool
) -> None:
    scheduler, runtime = make(
        vocab_size=VOCAB,
        prefix_cache=prefix_cache,
        page_size=page_size,
        num_pages=pool // page_size,
        max_batch_size=rows,
        max_prefill_tokens=budget,
        steps_in_flight=depth,
        max_seq_length=80,
    )
    expected = {}
    final = {}
    for number, (context, asked, max_new, priority, steps) in enumerate(script):
        items, name = context_items(context), f"r{number}"
        max_new = max_new if asked is not None else max_new + 1
        scheduler.add(request(name, items, max_new, priority=priority, prompt_outputs=asked))
        expected[name] = (items, asked, max_new)
        for _ in range(steps):
            final |= {u.request_id: u for u in scheduler.step() if u.finish_reason is not None}
            scheduler.check_integrity()
    final |= run(scheduler)
    for name, (items, asked, max_new) in expected.items():
        room = runtime.limits.max_positions - num_positions(items)
        assert tokens_of(final[name]) == by_hand(items, min(max_new, room), VOCAB), name
        report = final[name].output.fields["report"]
        assert report == (None if asked is None else report_by_hand(items, asked)), name
    assert scheduler._cache.num_leases == 0


def test_a_prompt_that_is_computed_whole_is_shared_with_others() -> None:
    scheduler, runtime = make(vocab_size=VOCAB)
    items = [image("cat"), *text(*range(1, 9))]

    def num_cached(name: str, asked: PromptOutputs | None) -> int:
        scheduler.add(request(name, items, 0 if asked else 1, prompt_outputs=asked))
        metrics = run(scheduler)[name].metrics
        assert metrics is not None
        return metrics.cached_tokens

    assert num_cached("first", None) == 0
    before = runtime.num_positions_computed
    assert num_cached("asks", BOTH) == 0
    assert runtime.num_positions_computed - before == num_positions(items)
    scheduler._cache.clear()
    assert num_cached("asks again", BOTH) == 0
    assert num_cached("follows", None) == num_positions(items) - 1


def test_nobody_waits_for_the_picture_of_one_that_asks_nor_does_it_wait() -> None:
    scheduler, _ = make(vocab_size=VOCAB, max_prefill_tokens=4)
    items = [image("cat"), *text(1, 2, 3)]
    scheduler.add(request("asks", items, 0, prompt_outputs=BOTH))
    scheduler.add(request("owner", items, 1))
    scheduler.add(request("parked", items, 1))
    scheduler.add(request("asks too", items, 0, prompt_outputs=BOTH))
    scheduler.step()
    stages = {name: sequence.stage for name, sequence in scheduler._sequences.items()}
    assert stages["parked"] is Stage.WAITING
    assert Stage.WAITING not in (stages["asks"], stages["owner"], stages["asks too"])
    assert len(run(scheduler)) == 4


def test_a_prompt_alone_may_fill_the_whole_context() -> None:
    scheduler, runtime = make(vocab_size=VOCAB, max_seq_length=12)
    full = text(*range(1, 13))
    scheduler.add(request("full", full, 0, prompt_outputs=BOTH))
    update = run(scheduler)["full"]
    assert update.finish_reason is FinishReason.LENGTH
    assert update.output is not None
    assert update.output.fields == {"tokens": [], "report": report_by_hand(full, BOTH)}
    assert runtime.num_positions_computed == 12
    with pytest.raises(RequestError, match="has 13 tokens but at most 12 fit"):
        scheduler.add(request("longer", [*full, TextToken(1)], 0, prompt_outputs=BOTH))
    with pytest.raises(RequestError, match="has 12 tokens but at most 11 fit"):
        scheduler.add(request("talks", full, 1, prompt_outputs=BOTH))


def test_a_prompt_preempted_half_way_is_reported_once_and_whole() -> None:
    """An urgent stream outgrows the pool while the other prompt, one position a step, is still being computed."""
    scheduler, _ = make(vocab_size=VOCAB, page_size=1, num_pages=50, max_prefill_tokens=1, prefix_cache=False)
    grammar = free_text(VOCAB)  # an id that is never sampled
    items = text(*[1 + i % 7 for i in range(30)])
    scheduler.add(request("urgent", text(1, 2), 40, grammar=grammar, priority=-1))
    scheduler.add(request("victim", items, 3, prompt_outputs=BOTH))
    victim = scheduler._sequences["victim"]
    num_scored = 0
    while victim.metrics.num_preemptions == 0:
        assert victim.open_report is not None, "preempted too late to matter"
        num_scored = len(victim.open_report.scores)
        scheduler.step()
    assert 0 < num_scored < 29
    update = run(scheduler)["victim"]
    assert update.output is not None
    assert update.output.fields == {
        "tokens": by_hand(items, 3, VOCAB),
        "report": report_by_hand(items, BOTH),
    }


def test_no_tokens_and_no_outputs_is_no_request() -> None:
    with pytest.raises(RequestError, match=r"max_tokens: must be at least 1 \(got 0\)"):
        request("idle", text(1, 2), 0)
    with pytest.raises(RequestError, match="asks for nothing"):
        PromptOutputs()
    with pytest.raises(RequestError, match="pool_from: 2 leaves no position of a prompt with 2"):
        request("beyond", text(1, 2), 0, prompt_outputs=PromptOutputs(pool_from=2))


@pytest.mark.parametrize("wish", [{"logprobs": 65}, {"logprobs": -1}, {"logprobs": True}, {"pool_from": -1}])
def test_a_wish_out_of_range_is_refused(wish: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="must be an integer from 0"):
        PromptOutputs(**wish)


def test_a_skill_that_fails_on_its_report_fails_alone() -> None:
    class Clumsy(Recorder):
        def consume_prompt(self, report: PromptReport) -> None:
            raise ValueError("dropped it")

    scheduler, _ = make(vocab_size=VOCAB)
    clumsy = request("clumsy", text(1, 2, 3), 4, prompt_outputs=BOTH)
    clumsy.consumer = Clumsy()
    scheduler.add(clumsy)
    scheduler.add(request("neighbour", text(1, 2, 3), 4, prompt_outputs=BOTH))
    final = run(scheduler)
    assert isinstance(final["clumsy"].error, ValueError)
    assert tokens_of(final["neighbour"]) == by_hand(text(1, 2, 3), 4, VOCAB)
