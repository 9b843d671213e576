"""Adapters over few slots: everyone is served with the own one, nobody waits for ever, nothing is held twice."""

from __future__ import annotations

import pytest

from kestrel.errors import RequestError
from kestrel.request import AdapterUse
from kestrel.scheduler.queues import PATIENCE_S
from kestrel.scheduler.sequence import SlotPool
from tests.scheduler.harness import by_hand, make, request, run, text, tokens_of


def use(key: str) -> AdapterUse:
    return AdapterUse(key, key, weights=f"weights of {key}")


def test_sixteen_adapters_over_four_slots_answer_as_each_alone() -> None:
    scheduler, _ = make(vocab_size=997, max_batch_size=8, num_pages=400, num_adapter_slots=4)
    for number in range(64):
        adapter = None if number % 17 == 16 else f"a{number % 17}"
        scheduler.add(request(f"r{number}", text(3, number + 1), adapter=adapter))
    final = run(scheduler)
    for number in range(64):
        adapter = None if number % 17 == 16 else f"a{number % 17}"
        assert tokens_of(final[f"r{number}"]) == by_hand(text(3, number + 1), 8, 997, adapter)
    assert scheduler.adapters.running == scheduler.adapters.waiting == []


@pytest.mark.parametrize("clients", [("y", "z"), ("y", "y"), ("y", None)])
def test_adapters_of_several_clients_that_have_waited_long_get_a_slot_one_after_the_other(
    clients: tuple[str, str | None],
) -> None:
    """None of them may keep the slot from the one that is called for it."""
    now_s = [0.0]
    scheduler, _ = make(vocab_size=1000, clock=lambda: now_s[0], num_adapter_slots=1)
    asks = zip("abc", ("red", "blue", "green"), ("x", *clients), strict=True)
    for name, adapter, client in asks:
        scheduler.add(request(name, text(1, 2), max_new_tokens=30, adapter=adapter, client=client))
        now_s[0] += 0.1
        scheduler.step()
    num_steps = 0
    while scheduler.has_work and num_steps < 500:
        now_s[0] += 0.1
        scheduler.step()
        num_steps += 1
    assert not scheduler.has_work
    assert num_steps > 10 * PATIENCE_S, "they have waited long"


def test_a_slot_keeps_its_adapter_until_the_one_left_longest_ago_must_go() -> None:
    pool = SlotPool(2)
    for key in ("a", "b"):
        lease = pool.try_acquire(use(key))
        assert lease is not None
        lease.release()
    assert [load.key for load in pool.take_loads()] == ["a", "b"]
    again = pool.try_acquire(use("a"))
    assert again is not None
    assert pool.take_loads() == []
    again.release()
    assert pool.try_acquire(use("c")) is not None
    assert [load.weights for load in pool.take_loads()] == ["weights of c"]
    assert pool.holds(use("a"))
    assert not pool.holds(use("b"))
    pool.check_integrity()


def test_a_slot_in_use_is_never_given_away_and_is_released_once() -> None:
    pool = SlotPool(1)
    first, second = pool.try_acquire(use("a")), pool.try_acquire(use("a"))
    assert first is not None
    assert second is not None
    first.release()
    assert pool.try_acquire(use("b")) is None
    second.release()
    assert pool.try_acquire(use("b")) is not None
    with pytest.raises(AssertionError):
        first.release()


def test_requests_of_the_base_pass_those_that_wait_for_a_slot() -> None:
    scheduler, _ = make(max_batch_size=3, num_adapter_slots=1)
    scheduler.add(request("long", text(3), max_new_tokens=40, adapter="a"))
    scheduler.step()
    scheduler.add(request("waits", text(4), adapter="b"))
    scheduler.add(request("base", text(5), max_new_tokens=2))
    seen: list[str] = []
    while scheduler.has_work:
        if "waits" not in seen and "base" not in seen:
            assert scheduler.adapters.waiting in (["b"], [])
        seen += [u.request_id for u in scheduler.step() if u.finish_reason is not None]
    assert seen.index("base") < seen.index("long") < seen.index("waits")


def test_a_busy_adapter_does_not_keep_its_slot_from_one_that_waits() -> None:
    now = [0.0]
    scheduler, _ = make(max_batch_size=2, num_adapter_slots=1, clock=lambda: now[0])
    finished: list[str] = []
    scheduler.add(request("first", text(3), max_new_tokens=6, adapter="busy"))
    scheduler.step()
    scheduler.add(request("patient", text(3), max_new_tokens=2, adapter="other"))
    for number in range(60):
        now[0] += PATIENCE_S / 10
        scheduler.add(request(f"busy{number}", text(3), max_new_tokens=6, adapter="busy"))
        finished += [u.request_id for u in scheduler.step() if u.finish_reason is not None]
    assert "patient" in finished


def test_cancelling_all_that_were_woken_lets_the_next_adapter_have_the_slot() -> None:
    scheduler, _ = make(max_batch_size=2, num_adapter_slots=1)
    scheduler.add(request("a", text(3), max_new_tokens=3, adapter="a"))
    scheduler.step()
    for name in ("b", "c"):
        scheduler.add(request(name, text(4), adapter=name))
    scheduler.step()
    assert scheduler.adapters.waiting == ["b", "c"]
    scheduler.cancel("b")
    scheduler.cancel("a")
    assert tokens_of(run(scheduler)["c"]) == by_hand(text(4), 8, 50, "c")


def test_an_adapter_whose_first_request_left_before_a_launch_is_still_loaded_for_the_second() -> None:
    scheduler, _ = make(max_batch_size=2, num_adapter_slots=1)
    scheduler.add(request("gone", text(3), adapter="a"))
    scheduler._admit()
    scheduler.cancel("gone")
    scheduler.add(request("stays", text(4), adapter="a"))
    assert tokens_of(run(scheduler)["stays"]) == by_hand(text(4), 8, 50, "a")


def test_without_slots_an_adapter_is_refused_by_name() -> None:
    scheduler, _ = make()
    with pytest.raises(RequestError, match="max_adapters"):
        scheduler.add(request("r", text(3), adapter="a"))
