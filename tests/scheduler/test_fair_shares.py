"""Clients take turns: what one of them has waiting is no matter of the others. Counted in steps and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kestrel.scheduler import GenerationScheduler
from kestrel.scheduler.queues import PATIENCE_S
from tests.scheduler.harness import make, request, run, text

ENDLESS = 1000
"""So large a vocabulary that no short answer of the fake runtime ends before its budget."""


def flood(scheduler: GenerationScheduler, client: str, number: int, max_new_tokens: int = 6, priority: int = 0) -> None:
    for index in range(number):
        scheduler.add(request(f"{client}{index}", text(3, 4), max_new_tokens, client=client, priority=priority))


def answered(scheduler: GenerationScheduler, max_steps: int = 20_000) -> Iterator[str]:
    """Ids in the order of their ends."""
    for _ in range(max_steps):
        if not scheduler.has_work:
            return
        updates = scheduler.step()
        scheduler.check_integrity()
        yield from (update.request_id for update in updates if update.finish_reason is not None)
    raise AssertionError(f"still work after {max_steps} steps")


def answers_before(scheduler: GenerationScheduler, request_id: str) -> int:
    return next(number for number, name in enumerate(answered(scheduler)) if name == request_id)


@pytest.mark.parametrize("max_batch_size", [1, 4])
@pytest.mark.parametrize("num_waiting", [20, 200])
def test_a_single_request_waits_for_the_next_free_row_however_many_of_another_client_wait(
    num_waiting: int, max_batch_size: int
) -> None:
    scheduler, _ = make(vocab_size=ENDLESS, max_batch_size=max_batch_size)
    flood(scheduler, "many", max_batch_size + num_waiting)
    for _ in range(3):
        scheduler.step()
    scheduler.add(request("one", text(5, 6), 6, client="other"))
    assert answers_before(scheduler, "one") <= 2 * max_batch_size


def test_each_client_gets_every_second_answer_whatever_the_others_have_waiting() -> None:
    scheduler, _ = make(vocab_size=ENDLESS)
    flood(scheduler, "many", 200)
    flood(scheduler, "few", 20)
    order = list(answered(scheduler))
    last = order.index("few19")
    assert sum(name.startswith("many") for name in order[:last]) <= 20 + 4


def test_long_answers_get_no_more_rows_than_short_ones() -> None:
    scheduler, _ = make(vocab_size=ENDLESS, num_pages=200)
    flood(scheduler, "long", 40, max_new_tokens=60)
    flood(scheduler, "short", 400, max_new_tokens=5)
    held: Counter[str | None] = Counter()
    for _ in range(400):
        scheduler.step()
        held.update(sequence.request.client for sequence in scheduler._running)
    assert 0.8 < held["long"] / held["short"] < 1.25


@pytest.mark.parametrize("client", [None, "one"])
def test_one_client_alone_starts_in_the_order_of_its_keys(client: str | None) -> None:
    now = [0.0]
    scheduler, _ = make(max_batch_size=1, clock=lambda: now[0])
    keys: dict[str, float] = {}
    for number in range(60):
        now[0] = float(number)
        priority = (number * 7) % 11 - 5
        keys[f"r{number}"] = priority * 5.0 + number
        scheduler.add(request(f"r{number}", text(3, 4), 1, client=client, priority=priority))
    assert list(answered(scheduler)) == sorted(keys, key=lambda name: keys[name])


def test_a_client_alone_has_all_rows() -> None:
    scheduler, _ = make(vocab_size=ENDLESS)
    flood(scheduler, "alone", 12)
    scheduler.step()
    assert scheduler.num_running == 4


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_an_urgent_flood_leaves_every_fourth_start_to_the_others(max_batch_size: int) -> None:
    scheduler, _ = make(vocab_size=ENDLESS, max_batch_size=max_batch_size)
    flood(scheduler, "urgent", 200, priority=-1_000_000)
    flood(scheduler, "normal", 10)
    order = list(answered(scheduler))
    for number in range(10):
        assert order.index(f"normal{number}") <= 4 * (number + 1) + max_batch_size
    assert order[:3] == ["urgent0", "urgent1", "urgent2"]


def test_background_work_waits_for_other_clients_until_it_has_aged() -> None:
    now = [0.0]
    scheduler, _ = make(vocab_size=ENDLESS, max_batch_size=1, clock=lambda: now[0])
    scheduler.add(request("background", text(3, 4), 2, client="patient", priority=2))
    flood(scheduler, "busy", 30, max_new_tokens=2)
    order: list[str] = []
    for name in answered(scheduler):
        order.append(name)
        now[0] += 1.0
    # Two levels are ten seconds: ten answers of the others, one that had begun, and its own.
    assert 9 <= order.index("background") <= 12


def test_pages_are_taken_from_the_client_with_most_rows() -> None:
    scheduler, _ = make(vocab_size=ENDLESS, num_pages=14, max_batch_size=4)
    flood(scheduler, "many", 8, max_new_tokens=30, priority=-1_000_000)
    scheduler.add(request("one", text(5, 6, 7, 8), 30, client="other"))
    final = run(scheduler)
    assert final["one"].metrics is not None
    assert final["one"].metrics.num_preemptions == 0
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_pages", [9, 12, 14, 20])
def test_no_flood_starves_another_client_when_pages_are_short(num_pages: int) -> None:
    """Two rows' worth of pages, and a client whose urgent requests never run out."""
    scheduler, _ = make(vocab_size=ENDLESS, num_pages=num_pages, max_batch_size=4)
    scheduler.add(request("one", text(5, 6, 7, 8), 28, client="other"))
    flood(scheduler, "urgent", 8, max_new_tokens=28, priority=-1_000_000)
    for number, name in enumerate(answered(scheduler)):
        if name == "one":
            assert number <= 12
            break
        scheduler.add(request(f"more{number}", text(3, 4), 28, client="urgent", priority=-1_000_000))


@pytest.mark.parametrize("priority", [0, -1_000_000])
@pytest.mark.parametrize("num_waiting", [20, 200])
def test_a_flood_for_one_adapter_gives_the_slot_to_another_clients(num_waiting: int, priority: int) -> None:
    now = [0.0]
    scheduler, _ = make(vocab_size=ENDLESS, max_batch_size=2, num_adapter_slots=1, clock=lambda: now[0])
    for number in range(num_waiting):
        scheduler.add(request(f"r{number}", text(3), 6, adapter="busy", client="many", priority=priority))
    scheduler.step()
    scheduler.add(request("one", text(3), max_new_tokens=2, adapter="other", client="other"))
    order: list[str] = []
    for name in answered(scheduler):
        order.append(name)
        now[0] += PATIENCE_S / 4
    assert order.index("one") <= 12


@pytest.mark.exhaustive
def test_turns_that_are_over_take_no_room() -> None:
    scheduler, _ = make(vocab_size=ENDLESS)
    for number in range(600):
        for client in ("first", "second", "third"):
            scheduler.add(request(f"{client}{number}", text(3, 4), 1, client=client, priority=number % 3 - 1))
    queue, most = scheduler._queue, 0
    for _ in answered(scheduler):
        most = max(most, len(queue._urgent) + len(queue._normal) + len(queue._later))
    assert most <= 3 * (2 * 3 + 64 + 1)
    assert not queue._lines
