"""Sequences that wait for an adapter slot while others run."""

from __future__ import annotations

from kestrel.scheduler.sequence import Sequence

PATIENCE_S = 1.0
"""How much later than the first waiter another may have come to still pass it with an adapter that is in a slot."""


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

    def push(self, sequence: Sequence) -> None:
        assert sequence.request.adapter is not None
        self._groups.setdefault(sequence.request.adapter.key, []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        assert sequence.request.adapter is not None
        group = self._groups[sequence.request.adapter.key]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.adapter.key]

    def pop_most_urgent(self) -> list[Sequence]:
        """All that wait for the adapter of the most urgent one."""
        if not self._groups:
            return []
        first = min(self._groups, key=lambda key: _most_urgent(self._groups[key]))
        return self._groups.pop(first)

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether a sequence may start before those who wait, although it came later: else a busy adapter would keep
        its slot for ever."""
        if not self._groups:
            return True
        return sequence.queue_key <= min(map(_most_urgent, self._groups.values())) + PATIENCE_S


def _most_urgent(group: list[Sequence]) -> float:
    return min(sequence.queue_key for sequence in group)
