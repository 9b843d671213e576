"""The step loop against answers worked out by hand."""

from __future__ import annotations

import pytest

from kestrel.errors import RequestCancelled, RequestError
from kestrel.grammar import END, Carries, Edge, Grammar, State
from kestrel.request import FinishReason, StreamUpdate
from kestrel.scheduler import GenerationScheduler
from kestrel.tokens import CoordToken, SizeToken, TextToken
from tests.scheduler.harness import by_hand, image, make, request, run, text, tokens_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def test_the_worked_example_of_the_fake_runtime() -> None:
    scheduler, _ = make(vocab_size=10)
    scheduler.add(request("a", text(3, 4), max_new_tokens=2))
    assert tokens_of(run(scheduler)["a"]) == [TextToken(8), TextToken(7)]


@DEPTHS
def test_an_answer_ends_at_the_end_token_or_at_its_budget(depth: int) -> None:
    for first in range(1, 40):
        prompt = text(first, 7, 9)
        scheduler, _ = make(steps_in_flight=depth)
        scheduler.add(request("a", prompt, max_new_tokens=6))
        update = run(scheduler)["a"]
        expected = by_hand(prompt, 6, 50)
        assert tokens_of(update) == expected
        assert update.finish_reason is (FinishReason.LENGTH if len(expected) == 6 else FinishReason.STOP)
        assert update.metrics is not None
        assert (update.metrics.input_tokens, update.metrics.output_tokens) == (3, len(expected))


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_strangers_in_a_batch_do_not_change_an_answer(depth: int, page_size: int, prefix_cache: bool) -> None:
    scheduler, _ = make(
        page_size=page_size, num_pages=600 // page_size, steps_in_flight=depth, prefix_cache=prefix_cache
    )
    prompts = {f"r{i}": [image(f"p{i % 3}"), *text(i + 1, 5, i + 2)] for i in range(20)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_new_tokens=5 + len(name)))
    final = run(scheduler)
    for name, prompt in prompts.items():
        assert tokens_of(final[name]) == by_hand(prompt, 5 + len(name), 50), name


def test_a_second_question_about_a_picture_computes_only_its_text() -> None:
    scheduler, runtime = make()
    scheduler.add(request("first", [image("cat", 30), *text(3, 4)], max_new_tokens=4))
    run(scheduler)
    before = runtime.num_positions_computed
    scheduler.add(request("second", [image("cat", 30), *text(9, 4, 2)], max_new_tokens=1))
    update = run(scheduler)["second"]
    assert update.metrics is not None
    assert update.metrics.cached_tokens == 30
    assert runtime.num_positions_computed - before == 3
    assert tokens_of(update) == by_hand([image("cat", 30), *text(9, 4, 2)], 1, 50)


def test_many_questions_at_once_about_one_picture_encode_it_once() -> None:
    scheduler, runtime = make(max_batch_size=16, num_pages=200)
    for i in range(12):
        scheduler.add(request(f"q{i}", [image("dog", 40), *text(i + 1, 2)], max_new_tokens=3))
    final = run(scheduler)
    assert all(tokens_of(final[f"q{i}"]) == by_hand([image("dog", 40), *text(i + 1, 2)], 3, 50) for i in range(12))
    assert runtime.num_positions_computed < 40 + 12 * (2 + 4)


def test_a_finished_answer_is_cached_for_a_follow_up() -> None:
    scheduler, _ = make(vocab_size=1000)
    prompt = text(3, 4, 8)
    scheduler.add(request("a", prompt, max_new_tokens=5))
    answer = tokens_of(run(scheduler)["a"])
    follow_up = [*prompt, *answer, *text(11)]
    scheduler.add(request("b", follow_up, max_new_tokens=2))
    update = run(scheduler)["b"]
    assert update.metrics is not None
    assert update.metrics.cached_tokens == len(prompt) + len(answer) - 1  # the last answer token was never fed
    assert tokens_of(update) == by_hand(follow_up, 2, 1000)


def test_namespaces_do_not_share_pictures() -> None:
    scheduler, _ = make()
    for tenant in ("a", "b"):
        scheduler.add(request(tenant, [image("x"), *text(4)], tenant=tenant))
        update = run(scheduler)[tenant]
        assert update.metrics is not None
        assert update.metrics.cached_tokens == 0


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunked_prefill_gives_the_same_answer_and_keeps_streams_moving(budget: int) -> None:
    scheduler, _ = make(max_prefill_tokens=budget, num_pages=200)
    scheduler.add(request("running", text(3, 4), max_new_tokens=60))
    for _ in range(3):
        scheduler.step()
    long_prompt = [*text(*range(1, 30)), image("far", 12), *text(*range(1, 20))]
    scheduler.add(request("long", long_prompt, max_new_tokens=4))
    final = run(scheduler)
    assert tokens_of(final["long"]) == by_hand(long_prompt, 4, 50)
    assert tokens_of(final["running"]) == by_hand(text(3, 4), 60, 50)


def test_decoding_rows_get_a_token_in_every_step_of_a_long_prefill() -> None:
    scheduler, _ = make(max_prefill_tokens=2, steps_in_flight=0, vocab_size=1000)
    scheduler.add(request("running", text(3, 4), max_new_tokens=50))
    scheduler.step()
    scheduler.add(request("long", text(*range(1, 41)), max_new_tokens=1))
    deltas = [sum(u.delta is not None for u in scheduler.step() if u.request_id == "running") for _ in range(20)]
    assert deltas == [1] * 20


@DEPTHS
def test_preemption_recomputes_and_changes_no_answer(depth: int) -> None:
    scheduler, _ = make(num_pages=12, page_size=4, max_batch_size=4, steps_in_flight=depth, vocab_size=1000)
    prompts = {f"r{i}": text(3 + i, 4, 5, 6) for i in range(4)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_new_tokens=30))
    final = run(scheduler)
    preempted = [u.metrics.num_preemptions for u in final.values() if u.metrics]
    assert sum(preempted) > 0
    for name, prompt in prompts.items():
        assert tokens_of(final[name]) == by_hand(prompt, 30, 1000), name


def test_a_lone_sequence_may_fill_the_whole_pool() -> None:
    scheduler, _ = make(num_pages=8, page_size=4, max_seq_length=1000, vocab_size=1000)
    scheduler.add(request("a", text(3, 4, 5), max_new_tokens=29))
    run(scheduler)
    scheduler.add(request("b", text(3, 4, 5), max_new_tokens=29))  # its prefix is cached and locked while it grows
    assert tokens_of(run(scheduler)["b"]) == by_hand(text(3, 4, 5), 29, 1000)


def test_a_context_that_fills_up_ends_with_length() -> None:
    scheduler, _ = make(max_seq_length=20, vocab_size=1000)
    scheduler.add(request("a", text(*range(1, 16)), max_new_tokens=100))
    update = run(scheduler)["a"]
    assert update.finish_reason is FinishReason.LENGTH
    assert len(tokens_of(update)) == 5


def test_a_prompt_that_can_never_fit_is_refused_alone() -> None:
    scheduler, _ = make(max_seq_length=20)
    scheduler.add(request("fits", text(1, 2)))
    with pytest.raises(RequestError, match="prompt: has 20 tokens but at most 19 fit"):
        scheduler.add(request("never", text(*range(1, 21))))
    assert set(run(scheduler)) == {"fits"}


def test_a_repeated_id_is_refused() -> None:
    scheduler, _ = make()
    scheduler.add(request("a", text(1)))
    with pytest.raises(RequestError, match="request_id"):
        scheduler.add(request("a", text(1)))


def test_lower_priority_numbers_start_first_and_waiting_catches_up() -> None:
    now = [0.0]
    scheduler, _ = make(max_batch_size=1, clock=lambda: now[0])
    order: list[str] = []
    for arrival, name, priority in ((0.0, "late-class", 2), (1.0, "normal", 0), (100.0, "urgent-but-new", 0)):
        now[0] = arrival
        scheduler.add(request(name, text(3, 4), max_new_tokens=1, priority=priority))
    while scheduler.has_work:
        order += [u.request_id for u in scheduler.step() if u.finish_reason]
    assert order == ["normal", "late-class", "urgent-but-new"]


def test_a_failing_skill_fails_its_own_request_only() -> None:
    scheduler, _ = make(vocab_size=1000)
    scheduler.add(request("bad", text(3, 4), fail_at=2))
    scheduler.add(request("good", text(5, 4)))
    final = run(scheduler)
    assert isinstance(final["bad"].error, ValueError)
    assert final["bad"].finish_reason is FinishReason.ERROR
    assert tokens_of(final["good"]) == by_hand(text(5, 4), 8, 1000)


@DEPTHS
def test_a_picture_that_fails_takes_only_its_request(depth: int) -> None:
    scheduler, runtime = make(steps_in_flight=depth, vocab_size=1000)
    broken = image("bad")
    runtime.failing_digests[broken.digest] = ValueError("damaged")
    scheduler.add(request("bad", [broken, *text(1)]))
    scheduler.add(request("bad2", [broken, *text(2)]))
    scheduler.add(request("good", [image("ok"), *text(1)]))
    final = run(scheduler)
    assert str(final["bad"].error) == str(final["bad2"].error) == "damaged"
    assert tokens_of(final["good"]) == by_hand([image("ok"), *text(1)], 8, 1000)


@DEPTHS
@pytest.mark.parametrize("after_steps", range(8))
def test_cancelling_at_any_moment_gives_everything_back(depth: int, after_steps: int) -> None:
    scheduler, _ = make(steps_in_flight=depth, vocab_size=1000, max_batch_size=2)
    for i in range(4):
        scheduler.add(request(f"r{i}", [image("shared"), *text(i + 1)], max_new_tokens=20))
    for _ in range(after_steps):
        scheduler.step()
    assert scheduler.cancel("r0")
    assert scheduler.cancel("r3")
    assert not scheduler.cancel("unknown")
    final = run(scheduler)
    assert isinstance(final["r0"].error, RequestCancelled)
    assert final["r3"].finish_reason is FinishReason.CANCELLED
    for name in ("r1", "r2"):
        assert tokens_of(final[name]) == by_hand([image("shared"), *text(int(name[1]) + 1)], 20, 1000)
    assert scheduler._cache.num_leases == 0


def test_fail_all_answers_everyone() -> None:
    scheduler, _ = make(max_batch_size=2)
    for i in range(5):
        scheduler.add(request(f"r{i}", text(i + 1, 3)))
    scheduler.step()
    error = RuntimeError("fault")
    assert {u.request_id for u in scheduler.fail_all(error)} == {f"r{i}" for i in range(5)}


def test_phases_have_their_own_budgets_and_a_spent_one_moves_on() -> None:
    thinking = State("think", Edge(0), ((3, Edge(1, emit=7)),), suppressed=(0,), phase=0, when_spent=3)
    answering = State("answer", Edge(1), ((0, Edge(END)),), suppressed=(0,), phase=1)
    scheduler, _ = make(vocab_size=1000)
    scheduler.add(request("a", text(11, 12), max_new_tokens=4, grammar=Grammar("two", (thinking, answering))))
    update = run(scheduler)["a"]
    tokens = tokens_of(update)
    assert len(tokens) == 4 + 1 + 4
    assert tokens[4] == TextToken(7)
    assert update.finish_reason is FinishReason.LENGTH


def test_typed_values_come_out_typed_and_survive_preemption() -> None:
    x = State("x", Edge(1, emit=5), carries=Carries.COORD)
    size = State("size", Edge(0, emit=6), carries=Carries.SIZE)
    grammar = Grammar("boxes", (x, size))
    alone, _ = make(vocab_size=1000)
    alone.add(request("a", text(1, 2), max_new_tokens=20, grammar=grammar))
    expected = tokens_of(run(alone)["a"])
    assert isinstance(expected[0], CoordToken)
    assert isinstance(expected[1], SizeToken)
    tight, _ = make(vocab_size=1000, num_pages=10, page_size=4)
    for name in ("a", "b", "c"):
        tight.add(request(name, text(1, 2), max_new_tokens=20, grammar=grammar))
    final = run(tight)
    assert sum(u.metrics.num_preemptions for u in final.values() if u.metrics) > 0
    assert all(tokens_of(final[name]) == expected for name in ("a", "b", "c"))


def test_an_id_used_again_after_a_cancel_gets_its_own_answer() -> None:
    scheduler, _ = make(max_batch_size=1, vocab_size=1000)
    scheduler.add(request("running", text(1, 2), max_new_tokens=30))
    scheduler.step()
    scheduler.add(request("x", text(3, 4), max_new_tokens=5))
    scheduler.cancel("x")
    scheduler.add(request("x", text(7, 8, 9), max_new_tokens=5))
    finals = [u for u in drain(scheduler) if u.finish_reason is not None and u.request_id == "x"]
    assert [u.finish_reason for u in finals] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    assert tokens_of(finals[1]) == by_hand(text(7, 8, 9), 5, 1000)


def test_an_id_used_again_for_another_picture_blocks_no_one() -> None:
    scheduler, _ = make(steps_in_flight=1, vocab_size=1000)
    scheduler.add(request("x", [image("one"), *text(3)]))
    scheduler.step()
    scheduler.cancel("x")
    scheduler.add(request("x", [image("two"), *text(3)]))
    drain(scheduler)
    scheduler.add(request("later", [image("one"), *text(4)]))
    assert tokens_of(run(scheduler)["later"]) == by_hand([image("one"), *text(4)], 8, 1000)


def drain(scheduler: GenerationScheduler) -> list[StreamUpdate]:
    updates: list[StreamUpdate] = []
    for _ in range(500):
        if not scheduler.has_work:
            break
        updates += scheduler.step()
        scheduler.check_integrity()
    assert not scheduler.has_work
    return updates


@pytest.mark.parametrize("bad", ["a string", {"not": "an output"}, None])
def test_a_skill_that_returns_the_wrong_type_fails_alone(bad: object) -> None:
    scheduler, _ = make(vocab_size=1000)
    wrong_finish, wrong_delta = request("finish", text(3, 4)), request("delta", text(5, 4))
    wrong_finish.consumer.finish = lambda reason: bad  # type: ignore[method-assign]
    if bad is not None:
        wrong_delta.consumer.consume = lambda token, logprobs: bad  # type: ignore[method-assign]
    for one in (wrong_finish, wrong_delta, request("good", text(6, 4))):
        scheduler.add(one)
    final = run(scheduler)
    assert isinstance(final["finish"].error, TypeError)
    assert isinstance(final["delta"].error, TypeError) or bad is None
    assert tokens_of(final["good"]) == by_hand(text(6, 4), 8, 1000)
