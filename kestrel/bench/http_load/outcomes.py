"""What became of one request, as the client saw it and as the server told it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.bench.http_load.client import Exchange


@dataclass(frozen=True)
class Outcome:
    """Times in seconds; those that nobody told are None."""

    started_s: float
    ended_s: float
    error: str | None = None
    """Why it has no answer: a status with the server's code, or the name of what broke."""
    ttft_s: float | None = None
    """In a stream the time until its first event here, otherwise what the server says."""
    processing_s: float | None = None
    decode_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.started_s


def outcome_of(exchange: Exchange) -> Outcome:
    """Of an answer that arrived whole; a stream that ends in an error event, or without its last one, has failed."""
    started_s, ended_s = exchange.started_s, exchange.ended_s
    result = _result(exchange)
    if exchange.status != 200 or result is None or "error" in result:
        return Outcome(started_s, ended_s, _error(exchange.status, result))
    metrics = result.get("metrics") or {}
    measured_s = exchange.first_data_s - started_s if exchange.is_stream else result.get("ttft_s")
    return Outcome(
        started_s,
        ended_s,
        ttft_s=measured_s,
        processing_s=result.get("processing_latency_s"),
        decode_s=result.get("decode_latency_s"),
        input_tokens=metrics.get("input_tokens", 0),
        output_tokens=metrics.get("output_tokens", 0),
    )


def _result(exchange: Exchange) -> dict[str, Any] | None:
    """The answer, in a stream its last event; None when it is not there."""
    data = exchange.body
    if exchange.is_stream and exchange.status == 200:
        events = [line for line in data.split(b"\n\n") if line.startswith(b"data: ")]
        if not events:
            return None
        data = events[-1][len(b"data: ") :]
    try:
        result = json.loads(data)
    except ValueError:
        return None
    is_whole = isinstance(result, dict) and ("error" in result or not exchange.is_stream or result.get("completed"))
    return result if is_whole else None


def _error(status: int, result: Mapping[str, Any] | None) -> str:
    told = (result or {}).get("error")
    code = told.get("code") or told.get("type") if isinstance(told, dict) else None
    if status == 200:
        return f"stream: {code}" if code else "no whole answer"
    return f"{status} {code}" if code else str(status)
