"""An engine that is asked about many things at once: what it has no room for waits, and each answer may fail alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kestrel.errors import CapacityError, KestrelError, NumericalError, RequestError, RequestFailed, ServerAway

if TYPE_CHECKING:
    from kestrel.engine.api import InferenceEngine
    from kestrel.engine.streams import EngineResult

FULL_WAIT_S = 0.02


class PatientEngine:
    """While the engine's queue is full, or pictures fill its memory, what is asked waits."""

    def __init__(self, engine: InferenceEngine, num_requests: int | None = None) -> None:
        """`num_requests`: how many to ask at the same time, for callers to heed."""
        self._engine = engine
        self.num_requests = num_requests or 2 * engine.max_batch_size
        self._num_asked = 0

    async def run(self, skill: str, **fields: Any) -> EngineResult:
        while True:
            self._num_asked += 1
            try:
                return await self._engine.run(skill, **fields)
            except CapacityError:
                if self._num_asked == 1:  # nothing else takes up room
                    raise
            finally:
                self._num_asked -= 1
            await asyncio.sleep(FULL_WAIT_S)


def is_about_request(error: KestrelError, own_fields: Collection[str]) -> bool:
    """Whether one request of many is at fault, by the fields that it does not share with the others; otherwise every
    request would meet the error."""
    if isinstance(error, RequestError):
        return error.field.partition("[")[0] in own_fields  # of object[2]
    is_full = isinstance(error, CapacityError) and not isinstance(error, ServerAway)
    return is_full or isinstance(error, (NumericalError, RequestFailed))
