"""What the connection below a request can do that ASGI has no word for: end at once, and tell when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

_CONNECTION = "kestrel.connection"


class Connection(Protocol):
    """For the protocol that makes the scope."""

    def hang_up(self) -> None:
        """End without waiting for a client that does not read, unsent bytes and all."""
        ...

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_gone` when the client hangs up, with no task to wait for it. Gives what ends the watch.

        For a client that has left already it is called soon, and never before this returns.
        """
        ...


def enable(scope: Scope, connection: Connection) -> None:
    scope[_CONNECTION] = connection


def connection_of(scope: Scope) -> Connection | None:
    """None under other servers than ours."""
    return scope.get(_CONNECTION)
