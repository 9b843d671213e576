"""How many may be at something at once: of one client, and in all."""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from kestrel.errors import TooManyRequests


class Places:
    """Refuses who finds none free. `what` is counted, `remedy` is what a refused client is told."""

    def __init__(self, what: str, remedy: str, *, per_client: int, in_all: int) -> None:
        self._what = what
        self._remedy = remedy
        self._per_client = per_client
        self._in_all = in_all
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def take(self, client: str) -> None:
        """Raises TooManyRequests."""
        if self._taken[client] >= self._per_client:
            raise TooManyRequests(f"this client has {self._per_client} {self._what} open; {self._remedy}")
        if self.num_taken >= self._in_all:
            raise TooManyRequests(f"the server has {self._in_all} {self._what} open; {self._remedy}")
        self._taken[client] += 1
        self.num_taken += 1

    def give_back(self, client: str) -> None:
        self.num_taken -= 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]


class Turns:
    """Lets who finds none free wait: `async with turns.of(client):`."""

    def __init__(self, per_client: int) -> None:
        self._per_client = per_client
        self._by_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, client: str) -> asyncio.Semaphore:
        turns = self._by_client.get(client)
        if turns is None:
            turns = self._by_client[client] = asyncio.Semaphore(self._per_client)
        return turns
