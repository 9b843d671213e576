"""Random traffic on random limits: every answer equals the by-hand one, and nothing is left behind."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.request import FinishReason, StreamUpdate
from kestrel.scheduler import GenerationScheduler
from kestrel.tokens import ContextItem
from tests.exhaustive import given_examples
from tests.scheduler.harness import by_hand, context_items, make, request, run, tokens_of

VOCAB = 40

contexts = st.tuples(
    st.sampled_from(["none", "cat", "dog"]),
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=25),
    st.sampled_from(["none", "none", "late"]),
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=6),
)
adapters = st.sampled_from([None, None, "red", "green", "blue", "grey"])
clients = st.sampled_from([None, None, "first", "second", "third"])
additions = st.tuples(
    st.just("add"), contexts, st.integers(1, 20), st.integers(-2, 2), adapters, st.booleans(), clients
)
actions = st.one_of(
    additions,
    additions,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


class Traffic:
    """Actions on a scheduler, and what its requests must come to."""

    def __init__(self, scheduler: GenerationScheduler) -> None:
        self.scheduler = scheduler
        self.expected: dict[str, tuple[list[ContextItem], int, str | None]] = {}
        self.final: dict[str, StreamUpdate] = {}
        self._names = map("r{}".format, itertools.count())

    def do(self, action: tuple) -> None:
        match action:
            case ("add", context, max_new, priority, adapter, is_streaming, client):
                options = {"priority": priority, "adapter": adapter, "is_streaming": is_streaming, "client": client}
                self._add(context_items(context), max_new, options)
            case ("cancel", index):
                self.scheduler.cancel(f"r{index}")
            case ("step", count):
                for _ in range(count):
                    self._take(self.scheduler.step())

    def settle(self) -> None:
        self._take(self.scheduler.settle())

    def finish(self) -> None:
        self._take(list(run(self.scheduler).values()))

    def _add(self, items: list[ContextItem], max_new: int, options: dict[str, Any]) -> None:
        name = self._free_name()
        try:
            self.scheduler.add(request(name, items, max_new, **options))
        except RequestError:
            return
        self.expected[name] = (items, max_new, options["adapter"])

    def _free_name(self) -> str:
        """That of a cancelled request, if there is one, which is forgotten."""
        for name, update in self.final.items():
            if update.finish_reason is FinishReason.CANCELLED:
                del self.expected[name], self.final[name]
                return name
        return next(self._names)

    def _take(self, updates: list[StreamUpdate]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                assert update.request_id not in self.final
                self.final[update.request_id] = update
        self.scheduler.check_integrity()


@given_examples(
    50,
    150,
    script=st.lists(actions, min_size=1, max_size=40),
    page_size=st.sampled_from([1, 3, 8]),
    pool=st.integers(60, 160),
    prefix_cache=st.booleans(),
    limits=st.fixed_dictionaries(
        {
            "max_batch_size": st.integers(1, 5),
            "max_prefill_tokens": st.integers(1, 40),
            "streaming_prefill_tokens": st.sampled_from([0, 1, 200, 300]),
            "steps_in_flight": st.integers(0, 1),
            "launch_waits": st.booleans(),
            "paces_pictures": st.booleans(),
            "num_adapter_slots": st.integers(1, 3),
        }
    ),
)
def test_random_traffic(
    script: list[tuple], page_size: int, pool: int, prefix_cache: bool, limits: dict[str, int]
) -> None:
    room = {"page_size": page_size, "num_pages": pool // page_size, "max_seq_length": 80}
    if limits["paces_pictures"]:
        limits = {**limits, "steps_in_flight": 0}
    scheduler, runtime = make(vocab_size=VOCAB, prefix_cache=prefix_cache, **room, **limits)
    traffic = Traffic(scheduler)
    for action in script:
        if not limits["launch_waits"]:  # the worker's order: what is due, then whoever came meanwhile
            traffic.settle()
        traffic.do(action)
    traffic.finish()

    assert set(traffic.final) == set(traffic.expected)
    for name, (items, max_new, adapter) in traffic.expected.items():
        if traffic.final[name].finish_reason is FinishReason.CANCELLED:
            continue
        left = runtime.limits.max_positions - sum(getattr(i, "num_positions", 1) for i in items)
        assert tokens_of(traffic.final[name]) == by_hand(items, min(max_new, left), VOCAB, adapter), name
    assert scheduler._cache.num_leases == scheduler._slots.num_leases == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert not scheduler._queue._lines
