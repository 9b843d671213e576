"""While someone reads an answer along, steps stay small and pictures are encoded in slices; answers do not change."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from kestrel.cache import CacheManager
from kestrel.runtime.contract import POSITIONS_PER_CROP, StepPlan
from kestrel.runtime.fake import NUM_CROPS, FakeRuntime, FakeStep
from kestrel.scheduler import GenerationScheduler
from kestrel.tokens import ImageSpan
from tests.scheduler.harness import by_hand, image, limits, make, request, run, text, tokens_of

TWO_CROPS = 2 * POSITIONS_PER_CROP
PROMPT = [image("far", 12), *text(*range(1, 20))]


def watched(steady: int, max_prefill_tokens: int = 4096) -> tuple[GenerationScheduler, list[StepPlan]]:
    """A scheduler, and the plans it launches."""
    numbers = {"num_pages": 400, "max_prefill_tokens": max_prefill_tokens, "max_seq_length": 1000}
    scheduler, runtime = make(streaming_prefill_tokens=steady, **numbers)
    plans: list[StepPlan] = []
    launch = runtime.launch

    def note_and_launch(plan: StepPlan) -> FakeStep:
        plans.append(plan)
        return launch(plan)

    runtime.launch = note_and_launch
    return scheduler, plans


def start_reader(scheduler: GenerationScheduler, is_streaming: bool = True) -> None:
    scheduler.add(request("reader", text(3, 4), max_new_tokens=60, is_streaming=is_streaming))
    for _ in range(3):
        scheduler.step()


def check_answers(scheduler: GenerationScheduler) -> None:
    final = run(scheduler)
    assert tokens_of(final["guest"]) == by_hand(PROMPT, 4, 50)
    assert tokens_of(final["reader"]) == by_hand(text(3, 4), 60, 50)


def test_a_picture_comes_in_slices_of_the_budget_and_is_prefilled_after_the_last() -> None:
    scheduler, plans = watched(TWO_CROPS)
    start_reader(scheduler)
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    check_answers(scheduler)
    sliced = [plan for plan in plans if plan.picture_slices]
    assert [slice_.max_crops for plan in sliced for slice_ in plan.picture_slices] == [2, 2, 2]
    assert NUM_CROPS == 5
    assert all(not plan.prefill and plan.decode for plan in sliced), "a slice is all that a step has beside the reader"
    with_picture = next(plan for plan in plans if any(chunk.items[0] == PROMPT[0] for chunk in plan.prefill))
    assert plans.index(with_picture) == plans.index(sliced[-1]) + 1


@pytest.mark.parametrize(("steady", "is_streaming"), [(TWO_CROPS, False), (0, True)])
def test_nobody_who_reads_along_or_no_budget_for_it_means_whole_pictures(steady: int, is_streaming: bool) -> None:
    scheduler, plans = watched(steady)
    start_reader(scheduler, is_streaming)
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    check_answers(scheduler)
    assert not any(plan.picture_slices for plan in plans)


def test_long_prompts_are_cut_to_the_smaller_budget() -> None:
    scheduler, plans = watched(steady=30)
    start_reader(scheduler)
    scheduler.add(request("long", text(*[7] * 100), max_new_tokens=2))
    scheduler.step()
    run(scheduler)
    assert [sum(chunk.num_positions for chunk in plan.prefill) for plan in plans if plan.prefill][1:] == [
        30,
        30,
        30,
        10,
    ]


def test_a_smaller_budget_for_all_times_holds_for_streams_too() -> None:
    scheduler, plans = watched(steady=30, max_prefill_tokens=20)
    start_reader(scheduler)
    scheduler.add(request("long", text(*[7] * 50), max_new_tokens=2))
    run(scheduler)
    assert [sum(chunk.num_positions for chunk in plan.prefill) for plan in plans if plan.prefill][1:] == [20, 20, 10]


def test_what_is_left_of_a_slice_goes_to_short_prompts() -> None:
    scheduler, plans = watched(TWO_CROPS + 20)
    start_reader(scheduler)
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    scheduler.add(request("short", text(5, 6), max_new_tokens=4))
    final = run(scheduler)
    assert tokens_of(final["short"]) == by_hand(text(5, 6), 4, 50)
    shared = next(plan for plan in plans if plan.picture_slices)
    assert [chunk.items for chunk in shared.prefill] == [text(5, 6)]


def test_a_request_whose_picture_is_in_slices_has_begun() -> None:
    scheduler, plans = watched(POSITIONS_PER_CROP)
    start_reader(scheduler)
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    assert not scheduler.has_begun("guest")
    scheduler.step()
    assert plans[-1].picture_slices
    assert scheduler.has_begun("guest")


def test_an_answer_that_ends_lets_the_rest_of_a_picture_come_whole() -> None:
    scheduler, plans = watched(POSITIONS_PER_CROP)
    start_reader(scheduler)
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    scheduler.step()
    scheduler.step()
    scheduler.cancel("reader")
    final = run(scheduler)
    assert tokens_of(final["guest"]) == by_hand(PROMPT, 4, 50)
    assert 0 < sum(len(plan.picture_slices) for plan in plans) < NUM_CROPS


def test_a_picture_that_fails_in_slices_fails_its_request_alone() -> None:
    scheduler, runtime = make(num_pages=400, streaming_prefill_tokens=TWO_CROPS)
    assert isinstance(runtime, FakeRuntime)
    start_reader(scheduler)
    runtime.failing_digests[PROMPT[0].digest] = ValueError("damaged")  # type: ignore[union-attr]
    scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    final = run(scheduler)
    assert "damaged" in str(final["guest"].error)
    assert tokens_of(final["reader"]) == by_hand(text(3, 4), 60, 50)


# ---------------------------------------------------------------------- between two tokens of a stream


class WorkingRuntime(FakeRuntime):
    """Counts what its device has done, in positions, when the tokens of a step are known on the host. It works in the
    order of a GPU: rows that decode, slices, prefill."""

    def __init__(self, budget: int) -> None:
        super().__init__(limits(num_pages=3000, max_seq_length=1200, max_prefill_tokens=4096, max_batch_size=8,
                                streaming_prefill_tokens=budget), vocab_size=50)  # fmt: skip
        self.num_done = 0
        self.told: list[int] = []
        """By step."""

    def launch(self, plan: StepPlan) -> FakeStep:
        self.num_done += len(plan.decode)
        known = self.num_done
        self.num_done += sum(slice_.max_crops * POSITIONS_PER_CROP for slice_ in plan.picture_slices)
        self.num_done += sum(chunk.num_positions for chunk in plan.prefill)
        ends_later = plan.is_told_whole or any(chunk.samples for chunk in plan.prefill)
        self.told.append(self.num_done if ends_later else known)
        return super().launch(plan)


@pytest.mark.parametrize("prompts", ["pictures", "long", "both"])
def test_between_two_tokens_of_a_stream_there_is_no_more_work_than_a_step_may_have(prompts: str) -> None:
    budget, rows = 5 * POSITIONS_PER_CROP, 8
    runtime = WorkingRuntime(budget)
    scheduler = GenerationScheduler(runtime, CacheManager(3000, 4))
    start_reader(scheduler)
    num_before = len(runtime.told)
    for number in range(6):
        if prompts != "long":
            picture = image(f"{number:02}", 4 * POSITIONS_PER_CROP)
            scheduler.add(request(f"picture{number}", [picture, *text(1, 2)], max_new_tokens=3))
        if prompts != "pictures":
            ids = [number + 1] * (budget + 300)
            scheduler.add(request(f"long{number}", text(*ids), max_new_tokens=3))
    while scheduler.has_begun("reader") and scheduler.has_work:
        scheduler.step()
    gaps = [after - before for before, after in itertools.pairwise(runtime.told[num_before - 1 :])]
    assert max(gaps) > budget / 2
    assert max(gaps) <= budget + rows


def test_only_steps_beside_a_stream_are_told_whole_and_only_those_with_more_than_tokens() -> None:
    for is_streaming in (True, False):
        scheduler, plans = watched(TWO_CROPS)
        start_reader(scheduler, is_streaming)
        scheduler.add(request("guest", PROMPT, max_new_tokens=4))
        check_answers(scheduler)
        for plan in plans[1:]:
            assert plan.is_told_whole == (is_streaming and not plan.only_decodes)


# ---------------------------------------------------------------------- where a picture takes seconds


def works_on_pictures(plan: StepPlan) -> bool:
    return bool(plan.picture_slices) or any(isinstance(chunk.items[0], ImageSpan) for chunk in plan.prefill)


@dataclass
class PacedRun:
    """A scheduler whose pictures are paced; a slice or a picture's prefill takes a second, any other step 0.1."""

    now_s: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each step began."""
    scheduler: GenerationScheduler = field(init=False)

    @property
    def share_of_pictures(self) -> float:
        """Of the time between the first and the last step with pictures, that one left out."""
        first, *_, last = (index for index, plan in enumerate(self.plans) if works_on_pictures(plan))
        num = sum(map(works_on_pictures, self.plans[first:last]))
        return num * 1.0 / (self.times_s[last] - self.times_s[first])

    def __post_init__(self) -> None:
        numbers = limits(
            num_pages=400, max_seq_length=1000, max_prefill_tokens=4096, steps_in_flight=0,
            streaming_prefill_tokens=TWO_CROPS, paces_pictures=True,
        )  # fmt: skip
        runtime = FakeRuntime(numbers, vocab_size=50)
        launch = runtime.launch

        def note_and_launch(plan: StepPlan) -> FakeStep:
            self.plans.append(plan)
            self.times_s.append(self.now_s)
            self.now_s += 1.0 if works_on_pictures(plan) else 0.1
            return launch(plan)

        runtime.launch = note_and_launch
        cache = CacheManager(numbers.num_pages, numbers.page_size)
        self.scheduler = GenerationScheduler(runtime, cache, clock=lambda: self.now_s)


def test_where_pictures_are_paced_no_step_encodes_a_whole_one_even_if_nobody_reads() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    assert tokens_of(run(paced.scheduler)["guest"]) == by_hand(PROMPT, 4, 50)
    assert [slice_.max_crops for plan in paced.plans for slice_ in plan.picture_slices] == [2, 2, 2]
    assert all(len(plan.picture_slices) <= 1 for plan in paced.plans)


def test_where_pictures_are_paced_readers_have_twice_as_much_time_as_pictures_beside_them() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("reader", text(3, 4), max_new_tokens=200, is_streaming=True))
    paced.scheduler.step()
    paced.scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    answers = run(paced.scheduler)
    assert tokens_of(answers["reader"]) == by_hand(text(3, 4), 200, 50)
    assert tokens_of(answers["guest"]) == by_hand(PROMPT, 4, 50)
    sliced = [index for index, plan in enumerate(paced.plans) if plan.picture_slices]
    assert [slice_.max_crops for index in sliced for slice_ in paced.plans[index].picture_slices] == [1] * NUM_CROPS
    rests_s = [paced.times_s[next_] - paced.times_s[index] - 1.0 for index, next_ in itertools.pairwise(sliced)]
    assert all(2.0 <= rest_s < 2.2 for rest_s in rests_s), rests_s


def test_where_pictures_are_paced_the_first_token_of_a_stream_waits_for_no_slice_that_is_not_begun() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("guest", PROMPT, max_new_tokens=4))
    paced.scheduler.step()
    assert paced.plans[-1].picture_slices
    paced.scheduler.add(request("reader", text(3, 4), max_new_tokens=200, is_streaming=True))
    paced.scheduler.step()
    assert [chunk.items for chunk in paced.plans[-1].prefill] == [text(3, 4)]
    assert not paced.plans[-1].picture_slices
    answers = run(paced.scheduler)
    assert tokens_of(answers["reader"]) == by_hand(text(3, 4), 200, 50)
    assert tokens_of(answers["guest"]) == by_hand(PROMPT, 4, 50)


def test_where_pictures_are_paced_a_stream_about_a_new_picture_rests_for_nobody() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("guest", PROMPT, max_new_tokens=4, is_streaming=True))
    run(paced.scheduler)
    assert [slice_.max_crops for plan in paced.plans for slice_ in plan.picture_slices] == [2, 2, 2]


def test_where_pictures_are_paced_their_prefill_counts_too() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("reader", text(3, 4), max_new_tokens=800, is_streaming=True))
    paced.scheduler.step()
    for number in range(3):
        paced.scheduler.add(request(f"guest{number}", [image(f"far{number}", 12), *text(1, 2)], max_new_tokens=1))
    run(paced.scheduler)
    assert sum(map(works_on_pictures, paced.plans)) == 3 * (NUM_CROPS + 1)
    assert paced.share_of_pictures == pytest.approx(1 / 3, abs=0.02)


def test_the_rest_after_a_slice_is_no_longer_when_nothing_was_done_for_a_while() -> None:
    paced = PacedRun()
    paced.scheduler.add(request("gone", PROMPT, max_new_tokens=4))
    paced.scheduler.step()
    paced.scheduler.cancel("gone")
    run(paced.scheduler)
    paced.now_s += 1000.0
    start_reader(paced.scheduler)
    paced.scheduler.add(request("guest", [image("other", 12), *text(1, 2)], max_new_tokens=4))
    paced.scheduler.step()
    assert paced.plans[-1].picture_slices
