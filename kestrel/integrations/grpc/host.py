"""What the endpoint asks of the process it is in: who may come in, and how a request runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from kestrel.engine import EngineStream
from kestrel.threads import Threads


class HostedRequest(Protocol):
    """One request between its arrival and its answer."""

    def run(
        self, skill: str, fields: Mapping[str, Any], *, stream: bool
    ) -> AbstractAsyncContextManager[EngineStream]: ...


class Visitor(Protocol):
    """A client that was let in."""

    @property
    def client(self) -> str:
        """Its name in counts and logs."""
        ...

    def request(self, route: str, num_bytes: int) -> AbstractContextManager[HostedRequest]:
        """Raises when there is no room for it, or the server is not serving. Its bytes count until it runs."""
        ...


class Interruption(Protocol):
    """A block that `interrupt` ends with an error, from a callback."""

    def __enter__(self) -> Interruption: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def interrupt(self) -> None: ...


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

    @property
    def body_threads(self) -> Threads:
        """Where large pictures are decoded from base64."""
        ...

    @property
    def receive_timeout_s(self) -> float: ...

    @property
    def request_timeout_s(self) -> float: ...

    @property
    def stream_idle_timeout_s(self) -> float: ...

    def interruption(self, error: Exception) -> Interruption: ...

    def admit(self, keys: Sequence[bytes], address: str) -> Visitor:
        """Raises Unauthorised."""
        ...
