"""Results and pieces of streams -> the JSON texts of TEXT_OUTPUT."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from kestrel.engine import EngineResult, EngineStream
from kestrel.engine.streams import chunk_body

OUTPUT = "TEXT_OUTPUT"
TEXT_SKILLS = frozenset({"query", "caption"})
"""Their streams are pieces of one text; those of the others are points, boxes and parts of an outline."""


@dataclass(frozen=True)
class Answer:
    """One response."""

    text: bytes
    """JSON."""
    is_final: bool


async def answers(stream: EngineStream, wants_pieces: bool) -> AsyncIterator[Answer]:
    """What the client gets of a running request: every piece as it comes and then the whole, or the whole alone."""
    opening: dict[str, Any] = {}
    if wants_pieces:
        async for chunk in stream:
            yield Answer(orjson.dumps(chunk_body(chunk)), is_final=False)
        opening = {"chunk": ""} if stream.skill in TEXT_SKILLS else {"type": "final"}
        opening["completed"] = True
    yield Answer(orjson.dumps({**opening, **result_body(await stream.result())}), is_final=True)


def result_body(result: EngineResult) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "request_id": result.request_id,
        "finish_reason": result.finish_reason,
        **result.output,
        "metrics": {
            "input_tokens": metrics.input_tokens,
            "output_tokens": metrics.output_tokens,
            "prefill_time_ms": metrics.prefill_time_ms,
            "decode_time_ms": metrics.decode_time_ms,
            "ttft_ms": metrics.ttft_ms,
        },
    }
