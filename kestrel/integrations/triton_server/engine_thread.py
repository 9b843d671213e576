"""An engine on an event loop in a thread of its own, for callers that have no loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.api import warm_up

T = TypeVar("T")
JOIN_S = 5.0


class EngineThread:
    """Loads the model when it is made; raises what keeps it from loading."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel-loop", daemon=True)
        self._thread.start()
        try:
            self.engine = self.submit(_ready_engine(config)).result()
        except BaseException:
            self._end_loop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, drain_s: float) -> None:
        """Let accepted requests finish, within `drain_s`; then end engine and loop."""
        try:
            self.submit(self.engine.shutdown(timeout_s=drain_s)).result()
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _ready_engine(config: RuntimeConfig) -> InferenceEngine:
    engine = await InferenceEngine.create(config)
    try:
        await warm_up(engine)
    except BaseException:
        await engine.shutdown(drain=False)
        raise
    return engine
