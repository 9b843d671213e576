"""Responses that clients may come back to: in memory, bounded, and each for the client alone that asked for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response, as JSON."""
    items: tuple[bytes, ...]
    """The conversation up to its end, each item as JSON."""

    @property
    def num_bytes(self) -> int:
        """Items that several responses share count in each."""
        return len(self.body) + sum(map(len, self.items))


@dataclass(slots=True)
class _Shelf:
    """What one client has here, oldest first."""

    responses: dict[str, StoredResponse] = field(default_factory=dict)
    num_bytes: int = 0

    def pop(self, response_id: str) -> StoredResponse:
        response = self.responses.pop(response_id)
        self.num_bytes -= response.num_bytes
        return response


class ResponseStore:
    """When it is full, the oldest response of the client that holds the most is let go."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    @property
    def is_off(self) -> bool:
        return self._max_responses == 0

    @property
    def num_responses(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def keep(self, client: str, response_id: str, response: StoredResponse) -> None:
        shelf = self._shelves[client]
        shelf.responses[response_id] = response
        shelf.num_bytes += response.num_bytes
        while self.num_bytes > self._max_bytes:
            self._let_go(lambda shelf: shelf.num_bytes)
        while self.num_responses > self._max_responses:
            self._let_go(lambda shelf: len(shelf.responses))

    def find(self, client: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(client)
        return None if shelf is None else shelf.responses.get(response_id)

    def remove(self, client: str, response_id: str) -> bool:
        """Whether it was there."""
        if self.find(client, response_id) is None:
            return False
        self._pop(client, response_id)
        return True

    def _let_go(self, size: Callable[[_Shelf], int]) -> None:
        client = max(self._shelves, key=lambda client: size(self._shelves[client]))
        self._pop(client, next(iter(self._shelves[client].responses)))

    def _pop(self, client: str, response_id: str) -> None:
        self._shelves[client].pop(response_id)
        if not self._shelves[client].responses:
            del self._shelves[client]
