"""The connection protocol: uvicorn's h11 one, with a limit on how long a request's head may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def timed_protocol(head_timeout_s: float) -> type[H11Protocol]:
    """A connection class that hangs up on a client whose request line and headers dawdle."""

    class TimedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            before: Any = self.cycle
            if before is not None and before.response_complete and self._head_timer is None:
                self._await_head()
            super().data_received(data)
            if self.cycle is not before:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(head_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimedProtocol
