"""Whether the event loop goes on while something slow is done for a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch


@asynccontextmanager
async def rounds_during(place: object, name: str) -> AsyncIterator[list[int]]:
    """How often the loop came round during each call of a function: never, where the call holds the loop or the GIL."""
    num_rounds, during, function = 0, [], getattr(place, name)

    async def tick() -> None:
        nonlocal num_rounds
        while True:
            await asyncio.sleep(0.001)
            num_rounds += 1

    def counted(*arguments: Any, **named: Any) -> Any:
        before = num_rounds
        try:
            return function(*arguments, **named)
        finally:
            during.append(num_rounds - before)

    ticker = asyncio.create_task(tick())
    try:
        with patch.object(place, name, counted):
            yield during
    finally:
        ticker.cancel()
