"""Room in the queue: how many requests may be unanswered, and who gives way when it is full.

One client alone may use all of it. When it is full, a client with nothing in it, or with less than an equal share,
still gets in: whoever has the most loses the newest of those that have not begun. Nobody loses the only one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from kestrel.errors import QueueFull

Client: TypeAlias = str | None
Held: TypeAlias = Mapping[Client, Mapping[str, int]]
"""What each request takes up, oldest first, by client."""


class QueueRoom:
    def __init__(self, max_requests: int, max_tokens: int | None, has_begun: Callable[[str], bool]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._has_begun = has_begun
        self._client_of: dict[str, Client] = {}
        self._tokens: dict[Client, dict[str, int]] = {}

    def enter(self, request_id: str, client: Client) -> list[str]:
        """Count a request in; returns those that give way to it, which are counted out. Raises QueueFull."""
        given_way: list[str] | None = []
        if len(self._client_of) >= self._max_requests:
            held = {other: dict.fromkeys(tokens, 1) for other, tokens in self._tokens.items()}
            given_way = self._giving_way(held, client, 1, self._max_requests)
        if given_way is None:
            raise QueueFull(f"{len(self._client_of)} requests are unanswered (max_queue_size); retry later")
        for other in given_way:
            self.leave(other)
        self._client_of[request_id] = client
        self._tokens.setdefault(client, {})[request_id] = 0
        return given_way

    def weigh(self, request_id: str, num_tokens: int) -> list[str]:
        """Note the length of a counted request's prompt; otherwise as `enter`."""
        if self._max_tokens is None:
            return []
        client = self._client_of[request_id]
        held = self._waiting_tokens()
        total = sum(sum(tokens.values()) for tokens in held.values())
        given_way: list[str] | None = []
        if total and total + num_tokens > self._max_tokens:
            given_way = self._giving_way(held, client, num_tokens, self._max_tokens)
        if given_way is None:
            raise QueueFull(f"{total} prompt tokens are waiting (max_queue_tokens); retry later")
        for other in given_way:
            self.leave(other)
        self._tokens[client][request_id] = num_tokens
        return given_way

    def leave(self, request_id: str) -> None:
        if request_id not in self._client_of:
            return
        client = self._client_of.pop(request_id)
        del self._tokens[client][request_id]
        if not self._tokens[client]:
            del self._tokens[client]

    def _waiting_tokens(self) -> Held:
        waiting = {
            client: {one: number for one, number in tokens.items() if number and not self._has_begun(one)}
            for client, tokens in self._tokens.items()
        }
        return {client: tokens for client, tokens in waiting.items() if tokens}

    def _giving_way(self, held: Held, client: Client, added: int, room: int) -> list[str] | None:
        """Who must leave so that `added` of the client fits; None when the client has its share already."""
        sums = {other: sum(weights.values()) for other, weights in held.items()}
        if client in sums and sums[client] + added > room / len(sums):
            return None
        excess = sum(sums.values()) + added - room
        others = {other: dict(weights) for other, weights in held.items() if other != client}
        leaving: list[str] = []
        while excess > 0:
            several = [other for other, weights in others.items() if len(weights) > 1]
            if not several:
                return None
            richest = max(several, key=lambda other: sums[other])
            newest = next((one for one in reversed(others[richest]) if not self._has_begun(one)), None)
            if newest is None:
                del others[richest]
                continue
            weight = others[richest].pop(newest)
            sums[richest] -= weight
            excess -= weight
            leaving.append(newest)
        return leaving
