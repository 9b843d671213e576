"""Rows with a constraint: each mask knows every token before it, and nobody else is held up by it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kestrel.errors import RequestError
from kestrel.grammar import END, Edge, Grammar, State
from kestrel.request import Constraint, FinishReason, GenerationRequest
from kestrel.tokens import TextToken
from tests.scheduler.harness import EOS, by_hand, make, request, run, text, tokens_of

VOCAB = 50


def mask(*ids: int) -> bytes:
    return sum(1 << token_id for token_id in ids).to_bytes(VOCAB // 8 + 1, "little")


@dataclass
class Countdown:
    """Allows one id: the one that follows from all tokens before it; after `length` of them only the end."""

    length: int
    seen: list[int] = field(default_factory=list)
    fail_at: int | None = None

    @property
    def expected(self) -> int:
        return EOS if len(self.seen) == self.length else 1 + (7 * sum(self.seen) + len(self.seen)) % (VOCAB - 1)

    @property
    def allowed(self) -> bytes:
        return mask(self.expected)

    def accept(self, token_id: int) -> None:
        assert token_id == self.expected, "a token that was not allowed"
        if len(self.seen) == self.fail_at:
            raise RequestError("response_format", "fails on purpose")
        self.seen.append(token_id)


def full_answer(length: int) -> list[TextToken]:
    constraint = Countdown(length)
    while constraint.expected != EOS:
        constraint.accept(constraint.expected)
    return [TextToken(token_id) for token_id in constraint.seen]


def constrained(request_id: str, items: list, length: int, phase: int = 0, **options) -> GenerationRequest:
    fail_at = options.pop("fail_at", None)
    made = request(request_id, items, **{"max_new_tokens": 60} | options)
    made.constraint = Constraint(Countdown(length, fail_at=fail_at), phase)
    return made


@pytest.mark.parametrize("depth", [0, 1])
def test_a_constrained_answer_follows_its_tokens_and_ends_with_it(depth: int) -> None:
    scheduler, _ = make(vocab_size=VOCAB, steps_in_flight=depth)
    scheduler.add(constrained("one", text(3, 4, 5), length=12))
    final = run(scheduler)["one"]
    assert tokens_of(final) == full_answer(12)
    assert final.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [0, 1])
def test_strangers_in_the_batch_answer_as_alone(depth: int) -> None:
    scheduler, _ = make(vocab_size=VOCAB, steps_in_flight=depth, max_batch_size=6)
    prompts = {f"free {i}": text(3 + i, 9, 2) for i in range(3)}
    for i, (name, prompt) in enumerate(prompts.items()):
        scheduler.add(request(name, prompt, max_new_tokens=15))
        scheduler.add(constrained(f"bound {i}", prompt, length=4 + i))
    final = run(scheduler)
    for name, prompt in prompts.items():
        assert tokens_of(final[name]) == by_hand(prompt, 15, VOCAB)
    for i in range(3):
        assert tokens_of(final[f"bound {i}"]) == full_answer(4 + i)


def test_with_a_step_in_flight_only_the_constrained_row_skips_a_step() -> None:
    scheduler, runtime = make(vocab_size=VOCAB, steps_in_flight=1)
    free = request("free", text(3, 4), max_new_tokens=20)
    free.grammar = Grammar("endless", (State("text", Edge(0), suppressed=(EOS,)),))
    scheduler.add(free)
    scheduler.add(constrained("bound", text(5, 6), length=20))
    rows: list[set[int]] = []
    launch = runtime.launch

    def note(plan):
        rows.append({one.row for one in plan.decode} | {chunk.row for chunk in plan.prefill})
        return launch(plan)

    runtime.launch = note
    final = run(scheduler)
    assert tokens_of(final["bound"]) == full_answer(20)
    both = [step for step in rows if len(step) == 2]
    free_row = next(iter(set.intersection(*rows[:20])))
    assert all(free_row in step for step in rows[:20]), "a stranger was held up"
    assert len(both) == 10


def test_a_preempted_sequence_goes_on_where_its_constraint_stands() -> None:
    scheduler, _ = make(vocab_size=VOCAB, num_pages=12, page_size=4, max_batch_size=3, prefix_cache=False)
    for i in range(3):
        scheduler.add(constrained(f"{i}", text(*range(1, 9)), length=22))
    final = run(scheduler)
    assert sum(update.metrics.num_preemptions for update in final.values() if update.metrics) > 0
    for update in final.values():
        assert tokens_of(update) == full_answer(22)


def test_a_budget_cuts_a_constrained_answer_short() -> None:
    scheduler, _ = make(vocab_size=VOCAB)
    scheduler.add(constrained("cut", text(3), length=12, max_new_tokens=5))
    final = run(scheduler)["cut"]
    assert tokens_of(final) == full_answer(12)[:5]
    assert final.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_a_constraint_that_fails_takes_nobody_along(depth: int) -> None:
    scheduler, _ = make(vocab_size=VOCAB, steps_in_flight=depth)
    scheduler.add(constrained("bad", text(3, 4), length=12, fail_at=3))
    scheduler.add(request("good", text(7, 8), max_new_tokens=9))
    final = run(scheduler)
    assert isinstance(final["bad"].error, RequestError)
    assert tokens_of(final["good"]) == by_hand(text(7, 8), 9, VOCAB)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_constraint_of_a_later_phase_leaves_the_earlier_one_free(depth: int) -> None:
    thought = State("thought", Edge(0), ((EOS, Edge(1, emit=11)),), suppressed=(11,), when_spent=EOS)
    answer = State("answer", Edge(1), ((EOS, Edge(END)),), phase=1)
    made = constrained("two phases", text(3, 4), length=5, phase=1, max_new_tokens=6)
    made.grammar = Grammar("two phases", (thought, answer))
    unbound = replace_constraint(made)
    scheduler, _ = make(vocab_size=VOCAB, steps_in_flight=depth)
    scheduler.add(made)
    tokens = tokens_of(run(scheduler)["two phases"])
    at = tokens.index(TextToken(11)) + 1
    assert tokens[at:] == full_answer(5)
    scheduler, _ = make(vocab_size=VOCAB, steps_in_flight=depth)
    scheduler.add(unbound)
    assert tokens_of(run(scheduler)["two phases"])[:at] == tokens[:at]


def replace_constraint(made: GenerationRequest) -> GenerationRequest:
    free = request(made.request_id, list(made.items), max_new_tokens=made.sampling.max_new_tokens, grammar=made.grammar)
    return replace(free, constraint=None)


def test_a_constrained_row_can_be_cancelled_at_any_step() -> None:
    for after in range(1, 8):
        scheduler, _ = make(vocab_size=VOCAB)
        scheduler.add(constrained("gone", text(3, 4), length=30))
        scheduler.add(constrained("stays", text(3, 5), length=9))
        for _ in range(after):
            scheduler.step()
        scheduler.cancel("gone")
        final = run(scheduler)
        assert final["gone"].finish_reason is FinishReason.CANCELLED
        assert tokens_of(final["stays"]) == full_answer(9)
