"""What the connection below a request can do that ASGI has no word for: end at once, unsent bytes and all."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

_HANG_UP = "kestrel.hang_up"


def enable_hang_up(scope: Scope, abort: Callable[[], None]) -> None:
    """For the protocol that makes the scope."""
    scope[_HANG_UP] = abort


def hang_up(scope: Scope) -> None:
    """End the connection without waiting for a client that does not read. Other servers than ours only see it close."""
    abort: Callable[[], None] | None = scope.get(_HANG_UP)
    if abort is not None:
        abort()
