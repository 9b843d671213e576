"""A request that keeps the embedded model busy for seconds: it may not end its answer before the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a program that only asks needs no torch
    from kestrel.engine import InferenceEngine

TOKENS = 1000


def long_query(end_id: int, max_tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    settings = {"temperature": 0.0, "suppressed_ids": [end_id], "max_tokens": max_tokens}
    return {"question": "Who are you?", "settings": settings, **more}


def end_id_of(engine: InferenceEngine) -> int:
    return engine.profile.end_id
