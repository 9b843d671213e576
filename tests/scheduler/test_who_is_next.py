"""Who gets the next rows can be asked without anybody moving."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from kestrel.scheduler.queues import WaitingQueue
from kestrel.scheduler.sequence import Sequence
from tests.exhaustive import given_examples
from tests.scheduler.harness import request, text

arrivals = st.tuples(st.integers(-2, 2), st.sampled_from([None, "first", "second", "third"]), st.integers(0, 3))
deeds = st.one_of(arrivals, arrivals, st.sampled_from(["start", "start", "end", "leave", "wait"]))


@given_examples(100, 1000, deeds=st.lists(deeds, max_size=40), most=st.integers(1, 5))
def test_soonest_are_those_that_are_taken_in_this_order(deeds: list, most: int) -> None:
    """Against the queue itself, after everything that can happen to it; asking changes nothing."""
    asked, untouched = Deeds(), Deeds()
    for deed in deeds:
        asked.do(deed)
        untouched.do(deed)
        asked.queue.soonest(most, asked.now_s)
    expected = [sequence.request_id for sequence in asked.queue.soonest(most, asked.now_s)]
    taken = [asked.start() for _ in range(most)]
    assert expected == [name for name in taken if name is not None]
    assert taken == [untouched.start() for _ in range(most)]


class Deeds:
    """A queue and who holds rows."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(ageing_s=5.0)
        self.now_s = 0.0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._names = map("r{}".format, itertools.count())

    def do(self, deed: tuple[int, str | None, int] | str) -> None:
        match deed:
            case (priority, client, seconds):
                self.now_s += seconds
                asked = request(next(self._names), text(1), priority=priority, client=client)
                sequence = Sequence(asked, self.queue.key(priority, self.now_s), 8)
                self._waiting.append(sequence)
                self.queue.push(sequence)
            case "start":
                self.start()
            case "end" if self._running:
                self.queue.gave_row(self._running.pop(0))
            case "leave" if self._waiting:
                self.queue.remove(self._waiting.pop(len(self._waiting) // 2))
            case "wait":
                self.now_s += 4.0

    def start(self) -> str | None:
        sequence = self.queue.try_pop(self.now_s)
        if sequence is None:
            return None
        self.queue.took_row(sequence)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return sequence.request_id
