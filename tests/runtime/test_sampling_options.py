"""Penalties, bias and endings on the device, token by token against a plain loop over the model's own logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel.grammar import END, Edge, Grammar, State, free_text
from kestrel.kernels.sampling import weigh_ids
from kestrel.request import FinishReason
from kestrel.runtime.contract import RowStart
from kestrel.runtime.rows import EndingTable, GrammarTables, WishTable
from kestrel.settings import SamplingParams
from kestrel.tokens import TextToken, Token
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.runtime.paged import Case, Paged, paged

EOS = 0
PROMPT = [0, 40, 41, 42, 40, 99]
CPU = torch.device("cpu")


def case(name: str, grammar: Grammar | None = None, budget: int = 24, **options: Any) -> Case:
    sampling = SamplingParams(max_new_tokens=budget, **options)
    return Case(name, [TextToken(i) for i in PROMPT], grammar or free_text(EOS), budget, sampling=sampling)


def small(**changes: Any) -> Paged:
    return paged(coarse("md2").model, **({"max_batch_size": 8, "num_pages": 200} | changes))


def naive(case: Case, logits_at: list[torch.Tensor]) -> list[int]:
    """Greedy ids chosen by hand from each step's own logits; stops at the end id."""
    sampling = case.sampling
    assert sampling is not None
    said: list[int] = []
    for logits_V in logits_at:
        scores = logits_V.float().tolist()
        for token_id, score in enumerate(scores):
            if token_id in said or (token_id in PROMPT and token_id != EOS):
                scores[token_id] = (
                    score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
                )
            scores[token_id] -= sampling.frequency_penalty * said.count(token_id)
            scores[token_id] -= sampling.presence_penalty * (token_id in said)
        for token_id, bias in sampling.logit_bias:
            scores[token_id] += bias
        if sampling.ignore_eos or len(said) < sampling.min_tokens:
            scores[EOS] = -float("inf")
        for token_id in sampling.stop_token_ids if len(said) < sampling.min_tokens else ():
            scores[token_id] = -float("inf")
        best = max(range(len(scores)), key=lambda i: scores[i])
        if best == EOS or best in sampling.stop_token_ids:
            break
        said.append(best)
    return said


OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "encouraged": {"frequency_penalty": -1.0, "presence_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.7},
    "all": {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((50, 100.0), (EOS, -100.0))},
    "bias and penalty": {"logit_bias": ((50, 3.0), (51, 2.5)), "frequency_penalty": 1.0},
    "end wanted": {"logit_bias": ((EOS, 100.0),)},
    "end wanted but early": {"logit_bias": ((EOS, 100.0),), "min_tokens": 5},
    "end ignored": {"logit_bias": ((EOS, 100.0),), "ignore_eos": True},
    "stop id": {"logit_bias": ((77, 100.0), (78, 99.0)), "stop_token_ids": (60, 77), "min_tokens": 4},
}


@sweep(
    ("name", "in_fixed_sizes"),
    [(name, fixed) for name in OPTIONS for fixed in (False, True)],
    always=[*((name, True) for name in OPTIONS), ("all", False)],
)
def test_greedy_tokens_equal_a_plain_loop(name: str, in_fixed_sizes: bool) -> None:
    engine = small(in_fixed_sizes=in_fixed_sizes)
    one = case(name, **OPTIONS[name])
    ours = [token.id for token in engine.run(one)[name] if isinstance(token, TextToken)]
    assert ours == naive(one, [logits_BV[0] for logits_BV in engine.decoder.logits_seen])


@sweep(
    ("in_fixed_sizes", "steps_in_flight", "temperature"),
    [(fixed, steps, temperature) for fixed in (False, True) for steps in (0, 1) for temperature in (0.0, 1.2)],
    always=[(True, 1, 1.2)],
)
def test_every_option_gives_the_same_alone_in_a_crowd_and_preempted(
    in_fixed_sizes: bool, steps_in_flight: int, temperature: float
) -> None:
    cases = [case(name, **options, temperature=temperature, seed=7) for name, options in OPTIONS.items()]
    plain = case("plain", temperature=temperature, seed=7)
    expected: dict[str, list[Token]] = {}
    for one in (*cases, plain):
        expected |= small().run(one)
    assert len({tuple(tokens) for tokens in expected.values()}) > len(OPTIONS) // 2
    how = {"in_fixed_sizes": in_fixed_sizes, "steps_in_flight": steps_in_flight, "max_batch_size": 16}
    assert small(**how).run(plain, *cases) == expected
    tight = small(**how, page_size=2, num_pages=36)
    final = tight.finish(*cases, plain)
    assert sum(update.metrics.num_preemptions for update in final.values() if update.metrics) > 0
    assert {name: update.output.fields["tokens"] for name, update in final.items() if update.output} == expected


@pytest.mark.parametrize("in_fixed_sizes", [False, True])
def test_logprobs_stay_those_of_the_model(in_fixed_sizes: bool) -> None:
    engine = small(in_fixed_sizes=in_fixed_sizes)
    one = case("x", budget=3, logit_bias=((50, 100.0),), presence_penalty=2.0, logprobs=1).request()
    seen = []
    consume = one.consumer.consume
    one.consumer.consume = lambda token, logprobs: (seen.append(logprobs), consume(token, logprobs))[1]
    engine.scheduler.add(one)
    while engine.scheduler.has_work:
        engine.scheduler.step()
    for logprobs, logits_BV in zip(seen, engine.decoder.logits_seen, strict=True):
        expected = torch.log_softmax(logits_BV[0].float(), -1)
        assert logprobs.chosen == pytest.approx(expected[50].item(), abs=1e-5)
        assert logprobs.top[0][1] == pytest.approx(expected.max().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "reason", "length"),
    [
        ({"logit_bias": ((77, 100.0),), "stop_token_ids": (77,)}, FinishReason.STOP, 0),
        ({"logit_bias": ((77, 100.0),), "stop_token_ids": (77,), "min_tokens": 3}, FinishReason.STOP, 3),
        ({"logit_bias": ((EOS, 100.0),), "min_tokens": 3}, FinishReason.STOP, 3),
        ({"logit_bias": ((EOS, 100.0),), "ignore_eos": True}, FinishReason.LENGTH, 6),
    ],
)
def test_endings_have_the_right_reason(options: dict[str, Any], reason: FinishReason, length: int) -> None:
    update = small().finish(case("x", budget=6, **options))["x"]
    assert update.output is not None
    assert (update.finish_reason, len(update.output.fields["tokens"])) == (reason, length)


def thinking_then_answer() -> Grammar:
    """Id 30 ends thinking; the end id and stop ids mean nothing before."""
    think = State("think", Edge(0), ((30, Edge(1)),), when_spent=30)
    return Grammar("two phases", (think, State("answer", Edge(1), ((EOS, Edge(END)),), phase=1)))


def test_only_answer_tokens_count_and_only_answers_end() -> None:
    wants_77 = {"logit_bias": ((77, 100.0),), "stop_token_ids": (77,), "min_tokens": 2}
    update = small().finish(case("x", thinking_then_answer(), budget=4, **wants_77))["x"]
    assert update.output is not None
    ids = [token.id for token in update.output.fields["tokens"]]
    assert ids[:5] == [77, 77, 77, 77, 30]
    assert len(ids) == 5 + 2
    assert update.finish_reason is FinishReason.STOP


def test_where_the_end_is_all_that_is_allowed_it_comes_early() -> None:
    only_end = Grammar("short", (State("one", Edge(1)), State("end", Edge(1), ((EOS, Edge(END)),), allowed=(EOS,))))
    update = small().finish(case("x", only_end, min_tokens=5))["x"]
    assert update.output is not None
    assert (len(update.output.fields["tokens"]), update.finish_reason) == (1, FinishReason.STOP)


def test_no_buffers_and_no_work_without_users() -> None:
    table = WishTable(4, 9, CPU)
    plain = RowStart(1, free_text(EOS), SamplingParams(), 10)
    table.start([plain])
    logits_BV = torch.randn(1, 9)
    assert table.among([1]) == 0
    assert table.users_among([1]) is None
    assert table._tensors == {}
    table.start([replace(plain, row=2, sampling=SamplingParams(presence_penalty=1.0), generated_ids=(3, 3))])
    users = table.users_among([1, 2])
    assert users is not None
    assert (users.at_U.tolist(), users.rows_U.tolist()) == ([1], [2])
    scores_BV = weigh_ids(torch.zeros(2, 9), torch.tensor([1, 2]), table.tensors(table.among([1, 2])))
    assert scores_BV.tolist() == [[0.0] * 9, [0.0] * 3 + [-1.0] + [0.0] * 5]
    table.start([replace(plain, row=2)])
    assert table.among([1, 2]) == 0
    endings = EndingTable(4, GrammarTables(9, CPU), CPU)
    endings.start([plain])
    assert endings.forbid(logits_BV, [1], torch.zeros(1, dtype=torch.int64), torch.zeros(1)) is logits_BV
