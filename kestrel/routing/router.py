"""Ranks the engines of a cluster for one request.

In this order it counts: whole batches of work that an engine has ahead, how much of the request it knows, whether the
adapter is loaded there, and the rest of its load. So what is known is sought where there is room for it; when that
engine is full the request goes to another one, which knows it from then on: a picture that many ask about spreads.

What nobody knows goes by a hash of its first key among engines of about equal load. Several routers that never talk to
each other therefore place it alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_STEPS = 2
"""Loads that differ by less than a batch over this are about equal."""
MAX_KEYS = 65536
"""Per engine, the newest: more than the pictures and pages that one has."""


@dataclass(frozen=True)
class ReplicaLoad:
    """As a replica last reported, plus what was sent to it since."""

    num_running: int
    num_waiting: int
    max_running: int
    adapters: frozenset[str] = frozenset()
    """Those that are loaded there."""

    @property
    def batches(self) -> float:
        """1.0: all rows are taken, and nobody waits."""
        return (self.num_running + self.num_waiting) / max(1, self.max_running)


class ContentRouter:
    """Not for several threads at a time."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._known: dict[str, OrderedDict[bytes, None]] = {}
        self._num_ranked = 0

    def add_replica(self, replica: str) -> None:
        """It knows nothing yet. One that is there already stays as it is."""
        self._known.setdefault(replica, OrderedDict())

    def remove_replica(self, replica: str) -> None:
        """With all that it had."""
        self._known.pop(replica, None)

    def num_known(self, replica: str, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, the replica has."""
        known = self._known.get(replica, {})
        return next((index for index, key in enumerate(keys) if key not in known), len(keys))

    def rank(self, keys: Sequence[bytes], adapter: str | None, loads: Mapping[str, ReplicaLoad]) -> list[str]:
        """Those replicas that were added and whose load is given, best first."""
        self._num_ranked += 1
        seed = keys[0] if keys else self._num_ranked.to_bytes(8, "little")

        def order(replica: str) -> tuple[int, int, bool, float, bytes]:
            load = loads[replica]
            batches = load.batches
            return (
                int(batches),
                -self.num_known(replica, keys),
                adapter is not None and adapter not in load.adapters,
                int(batches * LOAD_STEPS) if keys else batches,
                blake2b(seed + replica.encode(), digest_size=8).digest(),
            )

        return sorted((replica for replica in loads if replica in self._known), key=order)

    def note(self, replica: str, keys: Sequence[bytes]) -> None:
        """The replica has these beginnings now. The oldest ones are forgotten when there are too many."""
        known = self._known.get(replica)
        if known is None:
            return
        for key in reversed(keys):  # a beginning outlives what was built on it
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_keys:
            known.popitem(last=False)
