"""Beside steps that only decode, pictures are encoded for those who get the next rows: each once, and none in vain.

The fake runtime refuses orders for a step with other work, for a picture that it has, and for more than it may keep.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import strategies as st

from kestrel.request import FinishReason, PromptOutputs, StreamUpdate
from kestrel.runtime.contract import StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from kestrel.scheduler.queues import WaitingQueue
from kestrel.scheduler.sequence import Sequence
from kestrel.tokens import ContextItem, ImageSpan
from tests.exhaustive import given_examples
from tests.scheduler.harness import by_hand, image, make, request, run, text, tokens_of

ENDLESS = 1000
"""So large a vocabulary that no short answer of the fake runtime ends before its budget."""


class Watched:
    """A scheduler with a few rows, and the plans it launches."""

    def __init__(self, rows: int = 2, **changes: int) -> None:
        numbers = {"max_batch_size": rows, "num_pages": 800, "pictures_ahead": rows, **changes}
        self.scheduler, self.runtime = make(vocab_size=ENDLESS, **numbers)
        self.plans: list[StepPlan] = []
        self._launch = self.runtime.launch
        self.runtime.launch = self._note_and_launch

    def add(self, name: str, tag: str, max_new_tokens: int = 4, **options: object) -> None:
        self.scheduler.add(request(name, prompt(tag), max_new_tokens, **options))  # pyright: ignore[reportArgumentType]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()
            self.scheduler.check_integrity()

    @property
    def ahead(self) -> list[str]:
        """Tags of the pictures that were ordered ahead."""
        return [tag_of(plan.picture_ahead.digest) for plan in self.plans if plan.picture_ahead is not None]

    @property
    def prefilled(self) -> list[str]:
        chunks = itertools.chain.from_iterable(plan.prefill for plan in self.plans)
        return [tag_of(chunk.items[0].digest) for chunk in chunks if isinstance(chunk.items[0], ImageSpan)]

    def _note_and_launch(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        return self._launch(plan)


def prompt(tag: str) -> list[ContextItem]:
    return [image(tag), *text(7, 8)] if tag else text(7, 8)


def tag_of(digest: str) -> str:
    return bytes.fromhex(digest).rstrip(b"\0").decode()


def check_answers(final: dict[str, StreamUpdate], *names: str) -> None:
    for name in names:
        assert tokens_of(final[name]) == by_hand(prompt(name), 4, ENDLESS)


# ---------------------------------------------------------------------- each once, and none in vain


@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("num_clients", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_each_picture_is_encoded_once_however_many_clients_wait(
    rows: int, num_clients: int, steps_in_flight: int
) -> None:
    watched = Watched(rows, steps_in_flight=steps_in_flight)
    for number in range(64):
        watched.add(f"r{number}", f"{number:02}", max_new_tokens=12, client=f"c{number % num_clients}")
    run(watched.scheduler, check=False)
    assert watched.runtime.num_encoded == {image(f"{number:02}").digest: 1 for number in range(64)}
    assert len(watched.ahead) == 64 - rows, "only the first ones find nothing encoded"
    assert not watched.runtime.kept_ahead


@pytest.mark.parametrize("priorities", [(0,), (0, 1), (-1, 0), (2, -3, 0, 0)])
def test_with_one_row_the_picture_ahead_is_that_of_the_next_request(priorities: tuple[int, ...]) -> None:
    watched = Watched(rows=1)
    dice = itertools.cycle(itertools.product(priorities, ("first", "second", "third")))
    for number, (priority, client) in zip(range(40), dice, strict=False):
        watched.add(f"r{number}", f"{number:02}", max_new_tokens=3, client=client, priority=priority)
    run(watched.scheduler)
    assert watched.ahead == watched.prefilled[1:]


def test_they_come_one_in_a_step_and_only_beside_steps_that_decode() -> None:
    watched = Watched()
    for tag in "abcdef":
        watched.add(tag, tag)
    final = run(watched.scheduler)
    assert watched.ahead == ["c", "d", "e", "f"]
    assert all(plan.only_decodes for plan in watched.plans if plan.picture_ahead is not None)
    check_answers(final, *"abcdef")


def test_no_more_are_ordered_than_are_kept() -> None:
    watched = Watched(rows=2)
    for tag in "abcdef":
        watched.add(tag, tag, max_new_tokens=20)
    watched.steps(12)
    assert watched.ahead == ["c", "d"]
    assert len(watched.runtime.kept_ahead) == 2


def test_what_is_kept_for_someone_is_not_given_up_for_one_who_comes_sooner_or_later() -> None:
    watched = Watched(rows=1)
    watched.add("a", "a", max_new_tokens=6)
    watched.add("b", "b")
    watched.steps(4)
    assert watched.ahead == ["b"]
    watched.add("c", "c", client="another", priority=-1)
    run(watched.scheduler)
    assert watched.prefilled == ["a", "c", "b"]
    assert set(watched.runtime.num_encoded.values()) == {1}
    assert not any(plan.unwanted_pictures for plan in watched.plans)


def test_a_picture_that_is_cached_or_on_its_way_or_the_same_is_encoded_once() -> None:
    watched = Watched()
    watched.add("first", "a", max_new_tokens=1)
    run(watched.scheduler)
    for name, tag in (("x", "b"), ("y", "c"), ("again", "a"), ("same", "b"), ("d1", "d"), ("d2", "d"), ("text", "")):
        watched.add(name, tag, max_new_tokens=6)
    run(watched.scheduler)
    assert watched.ahead == ["d"]
    assert set(watched.runtime.num_encoded.values()) == {1}


def test_two_tenants_with_the_same_picture_have_it_encoded_for_each() -> None:
    watched = Watched(rows=1)
    for name, tenant in (("first", None), ("one", "x"), ("two", "y")):
        watched.add(name, "b" if tenant else "a", tenant=tenant)
    run(watched.scheduler)
    assert watched.ahead == ["b", "b"], "what one has prefilled is another one's picture no more"
    assert watched.runtime.num_encoded[image("b").digest] == 2


def test_a_request_that_wants_outputs_of_its_prompt_has_a_cached_picture_encoded_anew() -> None:
    watched = Watched(rows=1)
    watched.add("first", "a", max_new_tokens=1)
    run(watched.scheduler)
    watched.add("other", "b")
    watched.add("scored", "a", prompt_outputs=PromptOutputs(logprobs=0))
    run(watched.scheduler)
    assert watched.ahead == ["a"]
    assert watched.runtime.num_encoded[image("a").digest] == 2


# ---------------------------------------------------------------------- what comes between


def test_a_cancelled_request_makes_room_for_the_next() -> None:
    watched = Watched(rows=1)
    for tag in "abc":
        watched.add(tag, tag, max_new_tokens=12)
    watched.steps(4)
    watched.scheduler.cancel("b")
    watched.steps(3)
    assert watched.ahead == ["b", "c"]
    assert [plan.unwanted_pictures for plan in watched.plans if plan.unwanted_pictures] == [[image("b").digest]]
    assert watched.runtime.kept_ahead == {image("c").digest}
    run(watched.scheduler)
    assert set(watched.runtime.num_encoded.values()) == {1}


def test_who_comes_next_inherits_the_picture_of_a_cancelled_request() -> None:
    watched = Watched(rows=1)
    for name, tag in (("a", "a"), ("b", "b"), ("heir", "b")):
        watched.add(name, tag, max_new_tokens=12)
    watched.steps(4)
    watched.scheduler.cancel("b")
    run(watched.scheduler)
    assert watched.ahead == ["b"]
    assert watched.runtime.num_encoded[image("b").digest] == 1


def test_nothing_is_ordered_twice_while_the_runtime_is_still_at_the_last_one() -> None:
    watched = Watched(rows=2)
    for tag in "abcd":
        watched.add(tag, tag, max_new_tokens=12)
    watched.runtime.encodes_ahead = True
    watched.steps(6)
    assert set(watched.ahead) == {"c"}
    assert not watched.runtime.kept_ahead, "left out"
    watched.runtime.encodes_ahead = False
    watched.steps(3)
    assert {tag_of(digest) for digest in watched.runtime.kept_ahead} == {"c", "d"}
    run(watched.scheduler)
    assert set(watched.runtime.num_encoded.values()) == {1}


def test_a_picture_that_fails_ahead_fails_its_request_alone() -> None:
    watched = Watched(rows=1)
    for tag in "abc":
        watched.add(tag, tag)
    watched.runtime.failing_digests[image("b").digest] = ValueError("damaged")
    final = run(watched.scheduler)
    assert "damaged" in str(final["b"].error)
    check_answers(final, "a", "c")


def test_a_preempted_request_finds_its_picture_in_the_cache_or_has_it_encoded_again() -> None:
    watched = Watched(rows=2, num_pages=10, page_size=4)
    for tag in "abcd":
        watched.scheduler.add(request(tag, prompt(tag), max_new_tokens=20))
    final = run(watched.scheduler)
    assert watched.scheduler.num_preemptions
    for tag in "abcd":
        assert tokens_of(final[tag]) == by_hand(prompt(tag), 20, ENDLESS)


def test_a_request_whose_adapter_finds_no_slot_is_not_next() -> None:
    watched = Watched(rows=2, num_adapter_slots=1)
    watched.add("a", "a", max_new_tokens=20, adapter="red")
    watched.add("b", "b", max_new_tokens=20)
    for name, adapter in (("c", "green"), ("d", "red"), ("e", None)):
        watched.add(name, name, adapter=adapter)
    watched.steps(8)
    assert watched.ahead == ["d"]
    run(watched.scheduler)


# ---------------------------------------------------------------------- no cost where there is nothing to gain


def test_nothing_comes_beside_a_stream_or_where_the_runtime_keeps_none() -> None:
    for settings, is_streaming in (({}, True), ({"pictures_ahead": 0}, False)):
        watched = Watched(**settings)
        for tag in "abcd":
            watched.add(tag, tag, is_streaming=is_streaming)
        run(watched.scheduler)
        assert watched.ahead == []


def test_who_is_next_is_looked_up_once_for_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    soonest = WaitingQueue.soonest

    def noted(queue: WaitingQueue, most: int, now_s: float) -> list[Sequence]:
        looks.append(most)
        return soonest(queue, most, now_s)

    monkeypatch.setattr(WaitingQueue, "soonest", noted)
    watched = Watched()
    for name in ("x", "y", "z"):
        watched.add(name, "", max_new_tokens=30)
    watched.steps(25)
    assert looks == [2]
    watched.add("w", "w")
    watched.steps(3)
    assert looks == [2, 2]


# ---------------------------------------------------------------------- random traffic

requests = st.tuples(
    st.just("add"), st.sampled_from(["new", "new", "new", "cat", ""]), st.integers(1, 12), st.integers(-2, 2),
    st.sampled_from([None, "first", "second", "third"]), st.sampled_from([None, None, None, "red", "green"]),
)  # fmt: skip
actions = st.one_of(
    requests, requests, requests,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("busy"), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 6)),
)  # fmt: skip


@given_examples(
    60, 400,
    script=st.lists(actions, min_size=1, max_size=50),
    rows=st.integers(1, 4),
    kept=st.integers(1, 4),
    steps_in_flight=st.integers(0, 1),
)  # fmt: skip
def test_random_requests_of_several_clients(script: list, rows: int, kept: int, steps_in_flight: int) -> None:
    """Answers are those by hand, a new picture is encoded once, and one of a cancelled request at most once."""
    watched = Watched(rows, pictures_ahead=kept, steps_in_flight=steps_in_flight, num_adapter_slots=2)
    asked: dict[str, tuple[str, int, str | None]] = {}
    final: dict[str, StreamUpdate] = {}

    def take(updates: list[StreamUpdate]) -> None:
        final.update({update.request_id: update for update in updates if update.finish_reason is not None})
        watched.scheduler.check_integrity()

    for action in script:
        match action:
            case ("add", kind, max_new_tokens, priority, client, adapter):
                name = f"{len(asked):03}"
                asked[name] = (name if kind == "new" else kind, max_new_tokens, adapter)
                watched.add(name, *asked[name][:2], priority=priority, client=client, adapter=adapter)
            case ("cancel", index):
                watched.scheduler.cancel(f"{index:03}")
            case ("busy", is_busy):
                watched.runtime.encodes_ahead = is_busy
            case ("step", count):
                for _ in range(count):
                    take(watched.scheduler.step())
    final |= run(watched.scheduler)

    gone = {name for name, update in final.items() if update.finish_reason is FinishReason.CANCELLED}
    for name, (tag, max_new_tokens, adapter) in asked.items():
        if tag == name:
            num_encoded = watched.runtime.num_encoded[image(name).digest]
            assert num_encoded == 1 or (name in gone and num_encoded == 0)
        if name not in gone:
            assert tokens_of(final[name]) == by_hand(prompt(tag), max_new_tokens, ENDLESS, adapter)
    owned = Counter(map(tag_of, watched.runtime.kept_ahead))
    assert set(owned) <= gone | {"cat"}, "what is still kept is wanted by nobody, and goes with the next look"


def test_the_fake_runtime_refuses_what_the_contract_rules_out() -> None:
    watched = Watched(rows=1)
    for tag in "ab":
        watched.add(tag, tag, max_new_tokens=12)
    watched.steps(4)
    order = next(plan.picture_ahead for plan in watched.plans if plan.picture_ahead is not None)
    decode = watched.plans[-1].decode
    with pytest.raises(AssertionError, match="takes the time of others"):
        FakeRuntime(watched.runtime.limits).launch(StepPlan(0, picture_ahead=order))
    with pytest.raises(AssertionError, match="encoded twice"):
        watched.runtime.launch(StepPlan(99, decode=decode, picture_ahead=order))
