"""Ranks the engines of a cluster for one request.

In this order it counts: whole batches of work that an engine has ahead, how many of the request's pictures it knows,
and the rest of its load. So a picture is sought where it is known while there is room; when that engine is full the
request goes to another one, which knows it from then on: a picture that many ask about spreads.

A known beginning of text and a loaded adapter make up for some load only: one more engine learns them from a single
request. What many requests had in common, such as instructions, makes up for less and less, so all engines soon know
it. The turns of a conversation, each of which begins with all of the one before, count as one request: it stays where
it is.

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
MOST_WORTH = 0.25
"""Of a batch: neither makes up for more."""
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


@dataclass(slots=True)
class Beginning:
    """What a replica has of many requests."""

    num_requests: int = 0
    """That began so; one that goes on from another one is not counted again."""
    is_end: bool = False
    """Some request ended here, and none has gone on from there."""


class ContentRouter:
    """Not for several threads at a time. `has_others`: other routers send requests to the same replicas."""

    def __init__(self, max_keys: int = MAX_KEYS, *, has_others: bool = False) -> None:
        self._max_keys = max_keys
        self._has_others = has_others
        self._known: dict[str, OrderedDict[bytes, Beginning]] = {}
        """By replica and key."""
        self._num_ranked = 0

    def add_replica(self, replica: str) -> None:
        """It knows nothing yet. One that is there already stays as it is."""
        self._known.setdefault(replica, OrderedDict())

    def remove_replica(self, replica: str) -> None:
        """With all that it had."""
        self._known.pop(replica, None)

    def num_known(self, replica: str, keys: PrefixKeys) -> tuple[int, int]:
        """How many pictures and blocks of text, from the first on, the replica has."""
        num_known = _num_known(self._known.get(replica, {}), [*keys])
        num_pictures = min(num_known, len(keys.pictures))
        return num_pictures, num_known - num_pictures

    def rank(self, keys: PrefixKeys, adapter: str | None, loads: Mapping[str, ReplicaLoad]) -> list[str]:
        """Those replicas that were added and whose load is given, best first."""
        self._num_ranked += 1
        seed = next(iter(keys), self._num_ranked.to_bytes(8, "little"))

        def order(replica: str) -> tuple[int, int, float, bool, bytes]:
            load, has_adapter = loads[replica], adapter in loads[replica].adapters
            num_pictures, num_blocks = self.num_known(replica, keys)
            level = float(load.num_requests)
            if self._has_others and keys.pictures:
                level -= level % (load.max_running / LOAD_STEPS)
            most = MOST_WORTH * load.max_running
            level -= min(self._text_worth(replica, keys.blocks[:num_blocks]), most)
            level -= min(ADAPTER_WORTH, most) if has_adapter else 0
            place = blake2b(seed + replica.encode(), digest_size=8).digest()
            return load.num_requests // load.max_running, -num_pictures, level, not has_adapter, place

        return sorted((replica for replica in loads if replica in self._known), key=order)

    def _text_worth(self, replica: str, blocks: Sequence[bytes]) -> float:
        known = self._known[replica]
        return sum(1 / known[block].num_requests for block in blocks)

    def note(self, replica: str, keys: PrefixKeys) -> None:
        """The replica has these beginnings now. The oldest ones are forgotten when there are too many."""
        known = self._known.get(replica)
        if known is None:
            return
        listed = [*keys]
        num_known = _num_known(known, listed)
        goes_on = 0 < num_known < len(listed) and known[listed[num_known - 1]].is_end
        if goes_on:
            known[listed[num_known - 1]].is_end = False
        for index, key in reversed([*enumerate(listed)]):  # a beginning outlives what was built on it
            beginning = known.setdefault(key, Beginning())
            beginning.num_requests += not (goes_on and index < num_known)
            known.move_to_end(key)
        if listed:
            known[listed[-1]].is_end = True
        while len(known) > self._max_keys:
            known.popitem(last=False)


def _num_known(known: Mapping[bytes, Beginning], keys: Sequence[bytes]) -> int:
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))
