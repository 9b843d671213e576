"""How many unanswered requests each client has, whichever protocol they came by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel.errors import TooManyRequests


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
        self._unanswered[client] += 1
        try:
            yield
        finally:
            self._unanswered[client] -= 1
            if not self._unanswered[client]:
                del self._unanswered[client]
