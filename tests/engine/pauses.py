"""How long the event loop stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Pause:
    seconds: float = 0.0


@asynccontextmanager
async def longest_pause() -> AsyncIterator[Pause]:
    pause = Pause()

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.001)
            pause.seconds = max(pause.seconds, time.monotonic() - start)

    ticker = asyncio.create_task(tick())
    try:
        yield pause
    finally:
        ticker.cancel()
