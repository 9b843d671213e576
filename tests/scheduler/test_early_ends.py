"""A skill that has enough ends its sequence at once, and options that look back survive a preemption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kestrel.request import FinishReason, GenerationRequest, StreamDelta, TokenLogprobs
from kestrel.scheduler.sequence import Sequence
from kestrel.settings import SamplingParams
from kestrel.tokens import CoordToken, TextToken, Token
from tests.scheduler.harness import Recorder, by_hand, image, make, request, run, text, tokens_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
VOCAB = 1000


@dataclass
class Satisfied(Recorder):
    """Has enough after some tokens."""

    enough: int = 3
    says: str = "x"
    ends_in_flush: bool = False

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        assert self.reason is None, "a token after the end"
        super().consume(token, logprobs)
        has_enough = len(self.tokens) == self.enough and not self.ends_in_flush
        return StreamDelta(self.says if has_enough else "x", ends=has_enough)

    def flush(self) -> StreamDelta | None:
        return StreamDelta("", ends=True) if self.ends_in_flush else None


def satisfied(name: str, prompt: list, max_new_tokens: int = 30, **how: Any) -> GenerationRequest:
    one = request(name, prompt, max_new_tokens=max_new_tokens)
    one.consumer = Satisfied(**how)
    return one


@DEPTHS
@pytest.mark.parametrize("enough", [1, 2, 7])
def test_a_satisfied_skill_gets_no_further_token_and_gives_everything_back(depth: int, enough: int) -> None:
    scheduler, _ = make(steps_in_flight=depth, vocab_size=VOCAB, prefix_cache=False)
    scheduler.add(satisfied("a", text(3, 4), enough=enough))
    scheduler.add(request("other", text(5, 4), max_new_tokens=20))
    held_at_end = None
    final = {}
    for _ in range(100):
        updates = scheduler.step()
        final |= {update.request_id: update for update in updates if update.finish_reason is not None}
        scheduler.check_integrity()
        if "a" in final and held_at_end is None:
            scheduler.step()
            held_at_end = scheduler._cache.num_leases
        if not scheduler.has_work:
            break
    assert held_at_end == 1  # only the other one's, a step later
    assert tokens_of(final["a"]) == by_hand(text(3, 4), enough, VOCAB)
    assert final["a"].finish_reason is FinishReason.STOP
    assert final["a"].metrics.output_tokens == enough


def test_without_a_step_in_flight_an_answer_waits_for_nobody_elses_step() -> None:
    scheduler, _ = make(steps_in_flight=0, vocab_size=VOCAB)
    scheduler.add(request("long", text(5, 4), max_new_tokens=20))
    scheduler.step()
    scheduler.add(request("short", text(3, 4), max_new_tokens=1))
    (ended,) = [update for update in scheduler.step() if update.finish_reason is not None]
    assert ended.request_id == "short"
    scheduler.check_integrity()
    assert scheduler.num_running == scheduler._cache.num_leases == 1


def test_a_step_beside_the_host_is_settled_before_the_next_is_planned() -> None:
    scheduler, _ = make(steps_in_flight=0, launch_waits=False, vocab_size=VOCAB, max_batch_size=2)
    scheduler.add(request("first", text(3, 4), max_new_tokens=1))
    scheduler.add(request("second", text(5, 4), max_new_tokens=1))
    assert scheduler.step() == [], "it runs"
    ended = [update.request_id for update in scheduler.settle() if update.finish_reason is not None]
    assert sorted(ended) == ["first", "second"]
    scheduler.check_integrity()
    assert scheduler._cache.num_leases == 0, "who comes now finds all rows free"
    scheduler.add(request("third", text(7, 4), max_new_tokens=1))
    scheduler.add(request("fourth", text(9, 4), max_new_tokens=1))
    assert scheduler.step() == []
    assert scheduler.num_running == 2
    assert run(scheduler).keys() == {"third", "fourth"}
    assert scheduler.settle() == []


@DEPTHS
def test_an_end_on_the_last_token_of_the_budget_is_a_stop(depth: int) -> None:
    scheduler, _ = make(steps_in_flight=depth, vocab_size=VOCAB)
    scheduler.add(satisfied("consumed", text(3, 4), max_new_tokens=3, enough=3))
    scheduler.add(satisfied("flushed", text(5, 4), max_new_tokens=3, ends_in_flush=True))
    final = run(scheduler)
    assert {update.finish_reason for update in final.values()} == {FinishReason.STOP}


def test_an_end_without_text_says_nothing_to_the_stream() -> None:
    scheduler, _ = make(vocab_size=VOCAB)
    scheduler.add(satisfied("a", text(3, 4), enough=3, says=""))
    deltas = [update.delta for _ in range(10) for update in scheduler.step() if update.delta is not None]
    assert [delta.text for delta in deltas] == ["x", "x"]


def test_what_follows_an_early_end_finds_only_what_was_computed() -> None:
    scheduler, _ = make(vocab_size=VOCAB)
    scheduler.add(satisfied("a", text(3, 4, 8), enough=4))
    answer = tokens_of(run(scheduler)["a"])
    follow_up = [*text(3, 4, 8), *answer, *text(11)]
    scheduler.add(request("b", follow_up, max_new_tokens=4))
    update = run(scheduler)["b"]
    assert tokens_of(update) == by_hand(follow_up, 4, VOCAB)
    assert update.metrics is not None
    assert update.metrics.cached_tokens >= 3 + 4 - 1


@DEPTHS
@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.5, "logit_bias": ((7, 20.0), (9, -5.0))},
        {"frequency_penalty": -2.0, "min_tokens": 20},
    ],
)
def test_options_that_look_back_give_the_same_after_a_preemption(depth: int, options: dict[str, Any]) -> None:
    def one(name: str, first: int) -> GenerationRequest:
        made = request(name, text(first, 4, 5, 6))
        made.sampling = SamplingParams(max_new_tokens=30, **options)
        return made

    expected = {}
    for i in range(4):
        alone, _ = make(vocab_size=20)
        alone.add(one(f"r{i}", 3 + i))
        expected[f"r{i}"] = tokens_of(run(alone)[f"r{i}"])
    tight, _ = make(num_pages=12, page_size=4, steps_in_flight=depth, vocab_size=20)
    for i in range(4):
        tight.add(one(f"r{i}", 3 + i))
    final = run(tight)
    assert sum(update.metrics.num_preemptions for update in final.values() if update.metrics) > 0
    assert {name: tokens_of(update) for name, update in final.items()} == expected


def test_penalties_look_at_words_but_not_at_what_ends_the_answer() -> None:
    """Several models begin texts with the id that ends answers; a penalty on it would let no answer end."""
    made = request("a", [*text(0, 7), image("cat"), *text(9, 7)])
    sequence = Sequence(made, 0.0, 10)
    sequence.append(TextToken(9), 0, 1)
    sequence.append(CoordToken(0.5), 0, 2)
    assert sequence.penalised_ids() == ((), ())
    made.sampling = SamplingParams(repetition_penalty=1.5)
    assert sequence.penalised_ids() == ((7, 9, 7), (9,))


def test_the_fake_runtime_by_hand() -> None:
    """Vocabulary 10, prompt 3, 4: the plain answer is 8, 7."""
    scheduler, _ = make(vocab_size=10)
    for name, options in {
        "bias": {"logit_bias": ((0, 3.0),)},  # 8 scores 10, 9 scores 9, the end id 0 scores 8 + 3
        "no end": {"logit_bias": ((0, 3.0),), "ignore_eos": True},
        "stop": {"stop_token_ids": (8,)},
    }.items():
        made = request(name, text(3, 4))
        made.sampling = SamplingParams(max_new_tokens=1, **options)
        scheduler.add(made)
    final = run(scheduler)
    assert {name: (tokens_of(u), u.finish_reason) for name, u in final.items()} == {
        "bias": ([], FinishReason.STOP),
        "no end": ([TextToken(1)], FinishReason.LENGTH),
        "stop": ([], FinishReason.STOP),
    }
