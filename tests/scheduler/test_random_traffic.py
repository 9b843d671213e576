"""Random traffic on random limits: every answer equals the by-hand one, and nothing is left behind."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.request import FinishReason, StreamUpdate
from kestrel.tokens import ContextItem
from tests.scheduler.harness import by_hand, context_items, make, request, run, tokens_of

VOCAB = 40

contexts = st.tuples(
    st.sampled_from(["none", "cat", "dog"]),
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=25),
    st.sampled_from(["none", "none", "late"]),
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=6),
)
adapters = st.sampled_from([None, None, "red", "green", "blue", "grey"])
additions = st.tuples(st.just("add"), contexts, st.integers(1, 20), st.integers(-2, 2), adapters, st.booleans())
actions = st.one_of(
    additions,
    additions,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(actions, min_size=1, max_size=40),
    page_size=st.sampled_from([1, 3, 8]),
    pool=st.integers(60, 160),
    rows=st.integers(1, 5),
    budget=st.integers(1, 40),
    steady_budget=st.sampled_from([0, 1, 200, 300]),
    depth=st.integers(0, 1),
    launch_waits=st.booleans(),
    prefix_cache=st.booleans(),
    slots=st.integers(1, 3),
)
def test_random_traffic(
    script: list[tuple],
    page_size: int,
    pool: int,
    rows: int,
    budget: int,
    steady_budget: int,
    depth: int,
    launch_waits: bool,
    prefix_cache: bool,
    slots: int,
) -> None:
    scheduler, _ = make(
        vocab_size=VOCAB,
        prefix_cache=prefix_cache,
        page_size=page_size,
        num_pages=pool // page_size,
        max_batch_size=rows,
        max_prefill_tokens=budget,
        steps_in_flight=depth,
        launch_waits=launch_waits,
        max_seq_length=80,
        num_adapter_slots=slots,
        streaming_prefill_tokens=steady_budget,
    )
    expected: dict[str, tuple[list[ContextItem], int, str | None]] = {}
    final: dict[str, StreamUpdate] = {}

    def take(updates: list[StreamUpdate]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                assert update.request_id not in final
                final[update.request_id] = update

    for action in script:
        if not launch_waits:  # the worker's order: what is due, then whoever came meanwhile
            take(scheduler.settle())
            scheduler.check_integrity()
        match action:
            case ("add", context, max_new, priority, adapter, is_read_along):
                name, items = f"r{len(expected)}", context_items(context)
                if reused := [n for n in expected if n in final and final[n].finish_reason is FinishReason.CANCELLED]:
                    name = reused[0]
                    del expected[name], final[name]
                try:
                    scheduler.add(
                        request(name, items, max_new, None, priority, None, adapter, is_read_along=is_read_along)
                    )
                except RequestError:
                    continue
                expected[name] = (items, max_new, adapter)
            case ("cancel", index):
                scheduler.cancel(f"r{index}")
            case ("step", count):
                for _ in range(count):
                    take(scheduler.step())
                    scheduler.check_integrity()
    for name, update in run(scheduler).items():
        assert name not in final
        final[name] = update

    assert set(final) == set(expected)
    for name, (items, max_new, adapter) in expected.items():
        if final[name].finish_reason is FinishReason.CANCELLED:
            continue
        room = scheduler._limits.max_positions - sum(getattr(i, "num_positions", 1) for i in items)
        assert tokens_of(final[name]) == by_hand(items, min(max_new, room), VOCAB, adapter), name
    assert scheduler._cache.num_leases == scheduler._slots.num_leases == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
