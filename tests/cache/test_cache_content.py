"""Any order of operations, with the contents of every page followed: no aliasing, no second writer, no stale page."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kestrel.cache import CacheManager
from kestrel.errors import OutOfPages
from kestrel.request import CacheNamespace
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, num_positions
from tests.exhaustive import sweep

from .device_model import Device, SimulatedSequence

MAX_SEQUENCES = 5


def context_items(page_size: int) -> st.SearchStrategy[ContextItem]:
    token = st.builds(TextToken, st.integers(0, 1))
    value = st.sampled_from([CoordToken(0.5), SizeToken(0.5, 0.25)])
    widths = [1, page_size, page_size + 1, 2 * page_size - 1]
    span = st.builds(ImageSpan, st.just("a"), st.sampled_from(widths))
    return st.one_of(token, token, token, value, span)


class CacheMachine(RuleBasedStateMachine):
    """Sequences start, copy, compute, grow, publish and end at any time."""

    page_size = 1
    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(CacheManager(self.num_pages, self.page_size))

    def pick(self, data: st.DataObject) -> SimulatedSequence:
        return data.draw(st.sampled_from(self.device.sequences), label="sequence")

    def draw_items(self, data: st.DataObject, max_size: int) -> list[ContextItem]:
        items = st.lists(context_items(self.page_size), min_size=1, max_size=max_size)
        return data.draw(items, label="items")

    @precondition(lambda self: len(self.device.sequences) < MAX_SEQUENCES)
    @rule(data=st.data(), namespace=st.sampled_from([CacheNamespace(), CacheNamespace(adapter="one")]))
    def start(self, data: st.DataObject, namespace: CacheNamespace) -> None:
        items = self.draw_items(data, 8)
        try:
            self.device.start(namespace, items)
        except OutOfPages:
            fits_alone = num_positions(items) <= self.num_pages * self.page_size
            assert self.device.sequences or not fits_alone, "a context that fits was refused though nobody holds pages"

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.pick(data).copy()

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data(), num_items=st.integers(1, 8))
    def compute(self, data: st.DataObject, num_items: int) -> None:
        self.pick(data).write_items(num_items)

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data(), num_items=st.integers(0, 12))
    def publish(self, data: st.DataObject, num_items: int) -> None:
        self.pick(data).publish(num_items)

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        before = list(sequence.lease.pages)
        try:
            sequence.grow(self.draw_items(data, 3))
        except OutOfPages:
            assert sequence.lease.pages == before

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The common life of a sequence: all computed, all published, gone."""
        sequence = self.pick(data)
        sequence.write_items(len(sequence.items))
        sequence.publish(len(sequence.items))
        sequence.release()

    @precondition(lambda self: self.device.sequences)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        self.pick(data).release()

    @rule()
    def clear(self) -> None:
        self.device.manager.clear()

    @invariant()
    def everything_adds_up_and_nothing_was_overwritten(self) -> None:
        self.device.manager.check_integrity()
        self.device.verify()

    def teardown(self) -> None:
        for sequence in list(self.device.sequences):
            sequence.release()
        self.device.manager.clear()
        assert self.device.manager.num_free_pages == self.num_pages, "pages are lost"


class CacheMachineWithPagesOf3(CacheMachine):
    page_size = 3


class CacheMachineWithPagesOf16(CacheMachine):
    page_size = 16


class CacheMachineWithPagesOf64(CacheMachine):
    page_size = 64
    num_pages = 8


MACHINES = {1: CacheMachine, 3: CacheMachineWithPagesOf3, 16: CacheMachineWithPagesOf16, 64: CacheMachineWithPagesOf64}


@pytest.mark.parametrize("page_size", MACHINES)
@sweep("num_examples", [12, 100], always=[12])
def test_contents_stay_whole(page_size: int, num_examples: int) -> None:
    how_long = settings(max_examples=num_examples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(MACHINES[page_size], settings=how_long)
