"""Sequences that wait for an adapter slot while others run.

Of one client the most urgent comes first; clients take turns, as they do for rows.
"""

from __future__ import annotations

from collections.abc import Callable

from kestrel.scheduler.sequence import Sequence

PATIENCE_S = 1.0
"""How long others may still pass one that waits, with an adapter that is in a slot: those of the same client that came
so much later, those of other clients from when it was put aside."""


class SlotWaiters:
    """Grouped by adapter: one slot serves a whole group."""

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
