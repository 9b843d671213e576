"""What the endpoint asks of the process it is in: who may come in, and how a request runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from kestrel.engine import EngineStream


class HostedRequest(Protocol):
    """One request between its arrival and its answer."""

    def run(
        self, skill: str, fields: Mapping[str, Any], *, stream: bool
    ) -> AbstractAsyncContextManager[EngineStream]: ...


class Visitor(Protocol):
    """A client that was let in."""

    def request(self, route: str, num_bytes: int) -> AbstractContextManager[HostedRequest]:
        """Raises when there is no room for it, or the server is not serving."""
        ...


class Host(Protocol):
    @property
    def is_alive(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def model_names(self) -> Sequence[str]:
        """The engine's model under all its names."""
        ...

    @property
    def max_image_bytes(self) -> int: ...

    def admit(self, keys: Sequence[bytes], address: str) -> Visitor:
        """Raises Unauthorised."""
        ...
