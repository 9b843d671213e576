"""A request that keeps the embedded model busy for ten seconds on any machine: it may not end its answer before the
token budget, and servers of tests pause before its steps. The processor is free meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a program that only asks needs no torch
    from kestrel.engine import InferenceEngine
    from kestrel.scheduler import GenerationScheduler

TOKENS = 1001
PAUSE_S = 0.01


def long_query(end_id: int, max_tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    settings = {"temperature": 0.0, "suppressed_ids": [end_id], "max_tokens": max_tokens}
    return {"question": "Who are you?", "settings": settings, **more}


def end_id_of(engine: InferenceEngine) -> int:
    return engine.profile.end_id


def pause_for_long_requests(scheduler: GenerationScheduler[Any], pause_s: float = PAUSE_S) -> None:
    """Called before each step."""
    sequences = scheduler._sequences.values()
    if any(sequence.request.sampling.max_new_tokens == TOKENS for sequence in sequences):
        time.sleep(pause_s)
