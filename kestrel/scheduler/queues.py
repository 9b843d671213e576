"""The waiting line: priority with ageing.

A request's urgency at time t is `priority − waited / ageing_s`. Comparing two requests, t cancels out, so the order is
fixed at arrival: `priority · ageing_s + arrival`. A heap over that key is the whole policy.
"""

from __future__ import annotations

import heapq
from itertools import count

from kestrel.scheduler.sequence import Sequence


class WaitingQueue:
    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: list[tuple[float, int, Sequence]] = []
        self._tie = count()
        self._waiting: set[Sequence] = set()  # by identity: ids may be used again

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def key(self, priority: int, arrival_s: float) -> float:
        return priority * self._ageing_s + arrival_s

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.queue_key, next(self._tie), sequence))
        self._waiting.add(sequence)

    def try_pop(self) -> Sequence | None:
        while self._heap:
            sequence = heapq.heappop(self._heap)[2]
            if sequence in self._waiting:
                self._waiting.discard(sequence)
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence; its heap entry is skipped when it surfaces."""
        self._waiting.discard(sequence)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
