"""Ranks the engines of a cluster for one request.

In this order it counts: whole batches of work that an engine has ahead, how many of the request's pictures it knows,
and the rest of its load. So a picture is sought where it is known while there is room; when that engine is full the
request goes to another one, which knows it from then on: a picture that many ask about spreads.

A known beginning of text and a loaded adapter make up for some load only: one more engine learns them from a single
request. What many requests had in common, such as instructions, makes up for less and less, so all engines soon know
it; a conversation stays where it is.

Several routers never talk to each other. To place a picture that nobody knows alike, they go by a hash of it among
engines of about equal load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kestrel.routing.prefixes import PrefixKeys

ADAPTER_WORTH = 8
"""A loaded adapter makes up for so many requests that an engine has more than another one, and a block of text that one
request had for one."""
MOST_TEXT_WORTH = 0.25
"""Of a batch."""
LOAD_STEPS = 2
"""For several routers, loads that differ by less than a batch over this are about equal."""
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
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting


class ContentRouter:
    """Not for several threads at a time. `has_others`: other routers send requests to the same replicas."""

    def __init__(self, max_keys: int = MAX_KEYS, *, has_others: bool = False) -> None:
        self._max_keys = max_keys
        self._has_others = has_others
        self._known: dict[str, OrderedDict[bytes, int]] = {}
        """By replica: keys, and how many requests had each."""
        self._num_ranked = 0

    def add_replica(self, replica: str) -> None:
        """It knows nothing yet. One that is there already stays as it is."""
        self._known.setdefault(replica, OrderedDict())

    def remove_replica(self, replica: str) -> None:
        """With all that it had."""
        self._known.pop(replica, None)

    def num_known(self, replica: str, keys: PrefixKeys) -> tuple[int, int]:
        """How many pictures and blocks of text, from the first on, the replica has."""
        known = self._known.get(replica, {})
        num_known = next((index for index, key in enumerate(keys) if key not in known), len(list(keys)))
        num_pictures = min(num_known, len(keys.pictures))
        return num_pictures, num_known - num_pictures

    def rank(self, keys: PrefixKeys, adapter: str | None, loads: Mapping[str, ReplicaLoad]) -> list[str]:
        """Those replicas that were added and whose load is given, best first."""
        self._num_ranked += 1
        seed = next(iter(keys), self._num_ranked.to_bytes(8, "little"))

        def order(replica: str) -> tuple[int, int, float, bytes]:
            load = loads[replica]
            num_pictures, num_blocks = self.num_known(replica, keys)
            level = load.num_requests - self._text_worth(replica, keys.blocks[:num_blocks], load)
            if adapter in load.adapters:
                level -= ADAPTER_WORTH
            if self._has_others and keys.pictures:
                level //= load.max_running / LOAD_STEPS
            place = blake2b(seed + replica.encode(), digest_size=8).digest()
            return load.num_requests // load.max_running, -num_pictures, level, place

        return sorted((replica for replica in loads if replica in self._known), key=order)

    def _text_worth(self, replica: str, blocks: Sequence[bytes], load: ReplicaLoad) -> float:
        known = self._known[replica]
        return min(sum(1 / known[block] for block in blocks), MOST_TEXT_WORTH * load.max_running)

    def note(self, replica: str, keys: PrefixKeys) -> None:
        """The replica has these beginnings now. The oldest ones are forgotten when there are too many."""
        known = self._known.get(replica)
        if known is None:
            return
        for key in reversed([*keys]):  # a beginning outlives what was built on it
            known[key] = known.get(key, 0) + 1
            known.move_to_end(key)
        while len(known) > self._max_keys:
            known.popitem(last=False)
