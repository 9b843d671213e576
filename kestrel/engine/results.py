"""What callers get back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A finished request. `finish_reason` is "stop" (natural end) or "length" (a budget ended it)."""

    request_id: str
    skill: str
    output: dict[str, Any]
    text: str
    finish_reason: str
    metrics: RequestMetrics
    num_reasoning_tokens: int = 0
    """How many of `metrics.output_tokens` were thinking, the mark that ends it included."""
    adapter: str | None = None
    """The adapter it went through."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of a stream. `kind` is "text", or the type of a structured event whose `data` says more."""

    text: str
    token_index: int
    kind: str = "text"
    data: Mapping[str, Any] | None = None
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """When asked for: entries, as in `EngineResult.output["logprobs"]`, of the tokens whose text begins here."""
