"""Who waits, for a row or for an adapter slot. Clients take turns; within one client priority with ageing decides.

Within a client, a request's urgency at time t is `priority − waited / ageing_s`. Comparing two requests, t cancels out,
so the order is fixed at arrival: `priority · ageing_s + arrival`. A heap over that key is a client's line.

Between clients a free row goes to the one that holds the fewest rows; among equals, to the one that has held so few for
longest. There only the sign of a priority counts:
- below zero goes before other clients' work, but not more than MOST_URGENT times in a row while that waits;
- above zero goes behind other clients' work until it has waited `priority · ageing_s`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, TypeAlias

from kestrel.scheduler.sequence import Sequence

MOST_URGENT = 3
PATIENCE_S = 1.0
"""A request whose adapter is in a slot may overtake a waiter of its own client only if it arrived at most so many
seconds later, and one of another client for so long after that was put aside."""


class Line:
    """The waiting sequences of one client by their keys, and what decides about its turn."""

    __slots__ = ("_heap", "_waiting", "filed", "num_rows", "since")

    def __init__(self, since: int) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._waiting: set[Sequence] = set()  # by identity: ids may be used again
        self.num_rows = 0
        self.since = since
        """When the number of rows last changed."""
        self.filed = -1
        """Names the one entry of this line that counts."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def push(self, sequence: Sequence, tie: int) -> None:
        heapq.heappush(self._heap, (sequence.queue_key, tie, sequence))
        self._waiting.add(sequence)

    def first(self) -> Sequence:
        while self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def preview(self, most: int, ties: Iterator[int]) -> Line:
        """The same line with its first few alone."""
        line = Line(self.since)
        line.num_rows = self.num_rows
        waiting = (entry[2] for entry in in_order(self._heap) if entry[2] in self._waiting)
        for sequence in islice(waiting, most):
            line.push(sequence, next(ties))
        return line

    def pop(self) -> Sequence:
        sequence = self.first()
        heapq.heappop(self._heap)
        self._waiting.discard(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence; its heap entry is skipped when it surfaces."""
        self._waiting.discard(sequence)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)


Turns: TypeAlias = list[tuple[float, int, int, Line]]
"""A heap: what it is ordered by, twice; the name of the entry; whose it is."""


class WaitingQueue:
    """Every line with someone in it has one entry that counts, in the heap of its first sequence's kind."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lines: dict[str | None, Line] = {}
        self._urgent: Turns = []  # by rows held, and since when
        self._normal: Turns = []  # likewise
        self._later: Turns = []  # by the key of the first sequence: the time from which it counts as normal
        self._num_waiting = 0
        self._num_urgent_in_a_row = 0
        self._stamps = count()
        self.num_changes = 0
        """Of what there is to wait for whom; `soonest` says the same until there is another."""

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.request.client)
        return line is not None and sequence in line

    def key(self, priority: int, arrival_s: float) -> float:
        return priority * self._ageing_s + arrival_s

    def push(self, sequence: Sequence) -> None:
        line = self._line_of(sequence)
        line.push(sequence, next(self._stamps))
        self._num_waiting += 1
        self._file(line)

    def try_pop(self, now_s: float) -> Sequence | None:
        """Take out who is next at this time. It keeps its place if it is pushed again."""
        self._age(now_s)
        urgent, normal = self._first_of(self._urgent), self._first_of(self._normal)
        ahead = urgent if self._num_urgent_in_a_row < MOST_URGENT else None
        line = ahead or normal or urgent or self._first_of(self._later)
        if line is None:
            return None
        sequence = line.pop()
        self._num_waiting -= 1
        self._file(line)
        return sequence

    def soonest(self, most: int, now_s: float) -> list[Sequence]:
        """Who would get the next rows, if nobody came and no row were given back: tried on a copy of those whose turn
        it could be."""
        self._age(now_s)
        preview = WaitingQueue(self._ageing_s)
        preview._num_urgent_in_a_row = self._num_urgent_in_a_row
        preview._stamps = count(next(self._stamps))
        for turns in (self._urgent, self._normal, self._later):
            for line in islice(self._in_turn(turns), most):
                copied = line.preview(most, preview._stamps)
                preview._lines[copied.first().request.client] = copied
                preview._file(copied)
        soonest: list[Sequence] = []
        while len(soonest) < most and (sequence := preview.try_pop(now_s)) is not None:
            preview.took_row(sequence)
            soonest.append(sequence)
        return soonest

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting here or put aside."""
        line = self._line_of(sequence)
        if sequence in line:
            self._num_waiting -= 1
            line.remove(sequence)
        self._file(line)
        self._drop_idle(sequence.request.client, line)

    def took_row(self, sequence: Sequence) -> None:
        is_urgent = sequence.request.priority < 0
        self._num_urgent_in_a_row = self._num_urgent_in_a_row + 1 if is_urgent else 0
        self._change_rows(self._line_of(sequence), 1)

    def gave_row(self, sequence: Sequence) -> None:
        line = self._line_of(sequence)
        self._change_rows(line, -1)
        self._drop_idle(sequence.request.client, line)

    def turn_of(self, client: str | None) -> tuple[int, int]:
        """The smaller, the sooner: how many rows the client holds, and since when it has held so many."""
        line = self._lines.get(client)
        return (0, -1) if line is None else (line.num_rows, line.since)

    def last_in_turn(self, running: Iterable[Sequence]) -> Sequence:
        """Who has to give its row up first: the opposite of who would get one."""
        return max(running, key=lambda sequence: (*self.turn_of(sequence.request.client), sequence.queue_key))

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        num_rows = dict.fromkeys(self._lines, 0)
        for sequence in holders:
            num_rows[sequence.request.client] += 1
        assert {client: line.num_rows for client, line in self._lines.items()} == num_rows, "rows are miscounted"
        assert sum(map(len, self._lines.values())) == self._num_waiting, "the waiting are miscounted"
        filed = {entry[2] for heap in (self._urgent, self._normal, self._later) for entry in heap}
        assert all(line.filed in filed for line in self._lines.values() if len(line)), "a line has no turn"

    def _line_of(self, sequence: Sequence) -> Line:
        client = sequence.request.client
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = Line(next(self._stamps))
        return line

    def _change_rows(self, line: Line, by: int) -> None:
        line.num_rows += by
        line.since = next(self._stamps)
        self._file(line)

    def _drop_idle(self, client: str | None, line: Line) -> None:
        if not len(line) and not line.num_rows:
            del self._lines[client]

    def _file(self, line: Line) -> None:
        """Enter the line by its first sequence; an earlier entry of it counts no more."""
        line.filed = next(self._stamps)
        self.num_changes += 1
        if not len(line):
            return
        first = line.first()
        if first.request.priority > 0:
            self._enter(self._later, (first.queue_key, 0, line.filed, line))
        else:
            turns = self._urgent if first.request.priority < 0 else self._normal
            self._enter(turns, (line.num_rows, line.since, line.filed, line))

    def _age(self, now_s: float) -> None:
        while (line := self._first_of(self._later)) is not None and self._later[0][0] <= now_s:
            heapq.heappop(self._later)
            self._enter(self._normal, (line.num_rows, line.since, line.filed, line))
            self.num_changes += 1

    def _enter(self, turns: Turns, entry: tuple[float, int, int, Line]) -> None:
        heapq.heappush(turns, entry)
        if len(turns) > 2 * len(self._lines) + 64:
            turns[:] = [entry for entry in turns if entry[2] == entry[3].filed]
            heapq.heapify(turns)

    @staticmethod
    def _in_turn(turns: Turns) -> Iterator[Line]:
        """Those with an entry that counts, the first ones first."""
        return (entry[3] for entry in in_order(turns) if entry[2] == entry[3].filed)

    @staticmethod
    def _first_of(turns: Turns) -> Line | None:
        while turns and turns[0][2] != turns[0][3].filed:
            heapq.heappop(turns)
        return turns[0][3] if turns else None


def in_order(heap: list[Any]) -> Iterator[Any]:
    """The entries of a heap from the smallest on; it stays as it is, and what nobody asks for is not compared."""
    nearest = [(heap[0], 0)] if heap else []
    while nearest:
        entry, place = heapq.heappop(nearest)
        yield entry
        for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
            heapq.heappush(nearest, (heap[child], child))


class SlotWaiters:
    """Sequences that wait for an adapter slot while others run, grouped by adapter: one slot serves a whole group."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        use = sequence.request.adapter
        return use is not None and sequence in self._groups.get(use.key, ())

    def names(self) -> list[str]:
        """Names of the adapters waited for. Other threads may ask this too."""
        groups = [group[:1] for group in self._groups.copy().values()]
        return sorted({s.request.adapter.name for group in groups for s in group if s.request.adapter is not None})

    def push(self, sequence: Sequence, now_s: float) -> None:
        assert sequence.request.adapter is not None
        sequence.put_aside_s = now_s
        self._groups.setdefault(sequence.request.adapter.key, []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        assert sequence.request.adapter is not None
        group = self._groups[sequence.request.adapter.key]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.adapter.key]

    def pop_next(self, turn_of: Callable[[str | None], tuple[int, int]]) -> list[Sequence]:
        """All that wait for the adapter of the most urgent one of the client whose turn it is."""
        waiting = [sequence for group in self._groups.values() for sequence in group]
        if not waiting:
            return []
        client = min({sequence.request.client for sequence in waiting}, key=turn_of)
        first = min((s for s in waiting if s.request.client == client), key=lambda sequence: sequence.queue_key)
        assert first.request.adapter is not None
        return self._groups.pop(first.request.adapter.key)

    def may_pass(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence may start before those who wait: else a busy adapter would keep its slot for ever."""
        client = sequence.request.client
        return all(
            sequence.queue_key <= waiting.queue_key + PATIENCE_S
            if waiting.request.client == client
            else now_s <= waiting.put_aside_s + PATIENCE_S
            for group in self._groups.values()
            for waiting in group
        )
