"""How many unanswered requests each client has, whichever protocol they came by: every prompt and choice is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel.errors import RequestError, TooManyRequests


class ClientCounts:
    """Refuses a client with too many unanswered requests; None is no limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._unanswered: Counter[str] = Counter()

    @contextmanager
    def counted(self, client: str) -> Iterator[None]:
        """One request of a client, from its arrival to its answer. Raises TooManyRequests."""
        if self._limit is not None and self._unanswered[client] >= self._limit:
            raise TooManyRequests(
                f"{self._limit} requests of this client are unanswered (max_requests_per_client); retry later"
            )
        with self._held(client, 1):
            yield

    @contextmanager
    def all_counted(self, client: str, number: int, field: str) -> Iterator[None]:
        """The answers that a counted request asks for with `field`, until all are there. The first is counted already.

        Raises TooManyRequests, and RequestError where it could never succeed.
        """
        if self._limit is not None and number > self._limit:
            most = f"one client may have {self._limit} (max_requests_per_client)"
            raise RequestError(field, f"asks for {number} answers at once; {most}; ask for fewer at a time")
        if self._limit is not None and self._unanswered[client] + number - 1 > self._limit:
            others = f"{self._unanswered[client] - 1} other requests of this client are unanswered"
            raise TooManyRequests(
                f"{field} asks for {number} answers and {others}; "
                f"{self._limit} may be (max_requests_per_client); retry later"
            )
        with self._held(client, number - 1):
            yield

    @contextmanager
    def _held(self, client: str, number: int) -> Iterator[None]:
        self._unanswered[client] += number
        try:
            yield
        finally:
            self._unanswered[client] -= number
            if not self._unanswered[client]:
                del self._unanswered[client]
