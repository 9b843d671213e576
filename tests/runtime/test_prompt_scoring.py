"""Outputs of a prompt equal those of one dense pass: alone, in a crowd, chunked, preempted, in pages of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kestrel.errors import NumericalError
from kestrel.request import FinishReason, PromptOutputs, PromptReport, StreamUpdate
from kestrel.runtime import sampler
from kestrel.settings import SamplingParams
from kestrel.tokens import TextToken, num_positions
from tests.exhaustive import sweep
from tests.moondream.coarse import POSITIONS, coarse
from tests.moondream.goldens import FAMILIES, Golden
from tests.moondream.grammars import text_grammar
from tests.runtime.dense_prompt import dense_hidden, dense_logprobs
from tests.runtime.paged import Case, paged
from tests.runtime.test_paged_equality import all_skills
from tests.scheduler.harness import run

ASKED = PromptOutputs(logprobs=3, pool_from=1)
KINDS = ("refs", "caption", "text")


def asking_cases(g: Golden, tag: str = "ask") -> list[Case]:
    """With a picture and coordinates, with a picture, and with text alone."""
    cases = [case for case in all_skills(g, tag) if case.name.split(".")[1] in KINDS]
    return [replace(case, prompt_outputs=ASKED, max_new_tokens=2) for case in cases]


def report_of(update: StreamUpdate) -> PromptReport:
    assert update.output is not None, update.error
    return update.output.fields["report"]


def assert_dense(g: Golden, case: Case, update: StreamUpdate, tolerance: float = 1e-4) -> None:
    report = report_of(update)
    logprobs_NV, ids = dense_logprobs(g.naive, case.items, case.images)
    expected_N = logprobs_NV[torch.arange(len(ids)), ids]
    assert [score.logprob for score in report.scores] == pytest.approx(expected_N.tolist(), abs=tolerance)
    top_N3 = logprobs_NV.topk(3).values
    ours_N3 = torch.tensor([[logprob for _, logprob in score.top] for score in report.scores])
    torch.testing.assert_close(ours_N3, top_N3, atol=tolerance, rtol=0)
    for score, row_V in zip(report.scores, logprobs_NV, strict=True):
        assert row_V[[token_id for token_id, _ in score.top]].tolist() == pytest.approx(
            [x for _, x in score.top], abs=tolerance
        )
        assert (score.rank == 1) == (score.logprob == score.top[0][1])
    hidden_TD = dense_hidden(g.naive, case.items, case.images)[1:]
    assert report.num_pooled == len(hidden_TD) == num_positions(case.items) - 1
    torch.testing.assert_close(torch.tensor(report.hidden_mean), hidden_TD.mean(0), atol=tolerance, rtol=0)


@sweep(("family", "page_size"), [("md2", 1), ("md3", 16), ("md2", 64)], always=[("md2", 1), ("md3", 16)])
def test_in_a_crowd_of_strangers(family: str, page_size: int) -> None:
    g = coarse(family)
    cases, strangers = asking_cases(g), all_skills(g, "stranger", "multi")
    alone = paged(g.model).run(*strangers)
    engine = paged(g.model, page_size=page_size, steps_in_flight=1)
    final = engine.finish(*cases, *strangers)
    for case in cases:
        assert_dense(g, case, final[case.name])
    for stranger in strangers:
        output = final[stranger.name].output
        assert output is not None
        assert (output.fields["tokens"], output.fields["report"]) == (alone[stranger.name], None)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_on_a_warm_cache_that_is_not_read(family: str) -> None:
    g = coarse(family)
    engine = paged(g.model)
    for case in asking_cases(g):
        plain = replace(case, name=f"{case.name}.plain", prompt_outputs=None)
        tokens = engine.run(plain)[plain.name]
        update = engine.finish(case)[case.name]
        assert_dense(g, case, update)
        assert update.output is not None
        assert update.metrics is not None
        assert (update.output.fields["tokens"], update.metrics.cached_tokens) == (tokens, 0)


@sweep("family", FAMILIES, always=["md3"])
@sweep("budget", [1, 7, POSITIONS + 1], always=[7, POSITIONS + 1])
def test_chunked_prefill(family: str, budget: int) -> None:
    g = coarse(family)
    cases = asking_cases(g)
    final = paged(g.model, max_prefill_tokens=budget, steps_in_flight=1).finish(*cases)
    for case in cases:
        assert_dense(g, case, final[case.name])


@sweep("family", FAMILIES, always=["md3"])
def test_preempted_in_the_middle_of_the_prompt(family: str) -> None:
    """A more urgent stream grows until the asking sequence, still in its prefill, has to give its pages up."""
    g = coarse(family)
    case = replace(next(c for c in asking_cases(g) if c.name == "ask.text"), name="victim")
    context = [*case.items, *[TextToken(40 + i) for i in range(24)]]
    case = replace(case, items=context)
    urgent = replace(all_skills(g, "urgent")[-1], max_new_tokens=30, prompt_outputs=None)
    pages = num_positions(case.items) + num_positions(urgent.items) + 8
    engine = paged(g.model, page_size=1, num_pages=pages, max_prefill_tokens=1, prefix_cache=False)
    request = urgent.request()
    request.priority = -1
    for one in (request, case.request()):
        engine.scheduler.add(one)
    victim = engine.scheduler._sequences["victim"]
    while victim.metrics.num_preemptions == 0:
        num_scored = 0 if victim.open_report is None else len(victim.open_report.scores)
        engine.scheduler.step()
    assert 0 < num_scored < len(case.items) - 1
    assert_dense(g, case, run(engine.scheduler)["victim"])


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_generated_when_no_token_is_wanted(family: str) -> None:
    g = coarse(family)
    engine = paged(g.model)
    for case in asking_cases(g):
        silent = replace(case, sampling=SamplingParams(max_new_tokens=0))
        engine.decoder.logits_seen.clear()
        update = engine.finish(silent)[case.name]
        assert_dense(g, case, update)
        assert update.output is not None
        assert update.finish_reason is FinishReason.LENGTH
        assert update.output.fields["tokens"] == []
        num_scored = sum(len(logits) for logits in engine.decoder.logits_seen)
        assert num_scored == len(report_of(update).scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_greedy_continuation_fed_back_scores_as_it_did(family: str) -> None:
    g = coarse(family)
    base = all_skills(g, "base")[0]
    grammar = text_grammar(g.config)
    told = paged(g.model)
    request = Case("told", base.items, grammar, 8, base.images, SamplingParams(max_new_tokens=8, logprobs=1)).request()
    seen = []
    consume = request.consumer.consume
    request.consumer.consume = lambda token, logprobs: (seen.append((token, logprobs)), consume(token, logprobs))[1]
    told.scheduler.add(request)
    while told.scheduler.has_work:
        told.scheduler.step()
    assert len(seen) >= 4
    items = [*base.items, *(token for token, _ in seen)]
    sampling = SamplingParams(max_new_tokens=0)
    fed_back = Case("fed", items, grammar, 0, base.images, sampling, PromptOutputs(logprobs=1))
    scores = report_of(told.finish(fed_back)["fed"]).scores[-len(seen) :]
    assert [score.logprob for score in scores] == pytest.approx([logprobs.chosen for _, logprobs in seen], abs=1e-4)
    # The grammar bars one id from the second token on; everywhere else the greedy token is the likeliest, exactly.
    barred = g.config.tokenizer.answer_id
    assert all(s.rank == 1 and s.logprob == s.top[0][1] for s in scores if s.top[0][0] != barred)


def test_logits_are_made_for_a_slice_of_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    g = coarse("md2")
    monkeypatch.setattr(sampler, "MAX_LOGITS", 5 * g.config.text.vocab_size)
    case = replace(asking_cases(g)[-1], sampling=SamplingParams(max_new_tokens=0))
    engine = paged(g.model)
    update = engine.finish(case)[case.name]
    assert_dense(g, case, update)
    sizes = [len(logits) for logits in engine.decoder.logits_seen]
    assert len(sizes) > 1
    assert max(sizes) == 5


def test_numbers_that_are_none_fail_their_own_request_only() -> None:
    g = coarse("md2")
    case = replace(asking_cases(g)[-1], sampling=SamplingParams(max_new_tokens=0))
    stranger = all_skills(g, "stranger")[-1]
    engine = paged(g.model)
    engine.decoder.final_norm = lambda hidden_ND: hidden_ND * torch.nan
    final = engine.finish(case, stranger)
    assert isinstance(final[case.name].error, NumericalError)
    assert final[stranger.name].output is not None
