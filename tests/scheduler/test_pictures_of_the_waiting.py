"""While all rows decode, pictures of those who wait are encoded; answers do not change, and none is encoded twice."""

from __future__ import annotations

from kestrel.runtime.contract import StepPlan
from kestrel.runtime.fake import FakeStep
from kestrel.scheduler import GenerationScheduler
from kestrel.tokens import ContextItem
from tests.scheduler.harness import by_hand, image, make, request, run, text, tokens_of


def watched(**changes: int) -> tuple[GenerationScheduler, list[StepPlan]]:
    """A scheduler with two rows, and the plans it launches."""
    scheduler, runtime = make(**{"max_batch_size": 2, "num_pages": 400, "pictures_ahead": 4, **changes})
    plans: list[StepPlan] = []
    launch = runtime.launch

    def note_and_launch(plan: StepPlan) -> FakeStep:
        plans.append(plan)
        return launch(plan)

    runtime.launch = note_and_launch
    return scheduler, plans


def prompt(tag: str) -> list[ContextItem]:
    return [image(tag), *text(7, 8)]


def ahead(plans: list[StepPlan]) -> list[list[str]]:
    return [list(plan.pictures_ahead) for plan in plans if plan.pictures_ahead]


def digests(*tags: str) -> list[str]:
    return [image(tag).digest for tag in tags]


def test_those_who_are_next_come_together_and_again_when_one_is_missing() -> None:
    scheduler, plans = watched()
    for tag in "abcdefghij":
        scheduler.add(request(tag, prompt(tag), max_new_tokens=4))
    final = run(scheduler)
    assert ahead(plans) == [digests("c", "d", "e", "f"), digests("g", "h", "i", "j")]
    for plan in plans:
        assert not plan.pictures_ahead or (plan.decode and not plan.prefill)
    for tag in "abcdefghij":
        assert tokens_of(final[tag]) == by_hand(prompt(tag), 4, 50)


def test_a_picture_that_is_cached_or_being_prefilled_is_not_encoded_again() -> None:
    scheduler, plans = watched()
    scheduler.add(request("first", prompt("a"), max_new_tokens=1))
    run(scheduler)
    for name, tag in (("x", "b"), ("y", "c"), ("again", "a"), ("same", "b"), ("text", "")):
        scheduler.add(request(name, prompt(tag) if tag else text(1, 2), max_new_tokens=4))
    run(scheduler)
    assert ahead(plans) == []


def test_nothing_comes_beside_a_stream_or_where_the_runtime_wants_none() -> None:
    for settings, is_streaming in (({}, True), ({"pictures_ahead": 0}, False)):
        scheduler, plans = watched(**settings)
        for tag in "abcd":
            scheduler.add(request(tag, prompt(tag), max_new_tokens=4, is_streaming=is_streaming))
        run(scheduler)
        assert ahead(plans) == []
