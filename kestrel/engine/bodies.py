"""Pieces of a stream as plain data, the way every front end writes them."""

from __future__ import annotations

from typing import Any

from kestrel.engine.results import StreamChunk


def chunk_body(chunk: StreamChunk) -> dict[str, Any]:
    """Text has no type. Thinking has one and no `chunk`, so that joined chunks are the answer alone."""
    place = {"completed": False, "token_index": chunk.token_index}
    match chunk.kind:
        case "text":
            return {"chunk": chunk.text, **place}
        case "reasoning":
            return {"type": "reasoning", "reasoning": chunk.text, **place}
        case "path_delta":
            return {"type": "path_delta", "chunk": chunk.text, **place}
        case "bbox":
            return {"type": "bbox", **(chunk.data or {}), **place}
    return {"type": chunk.kind, chunk.kind: chunk.data, **place}
