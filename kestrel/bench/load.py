"""Clients of the engine benchmark, and what they saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kestrel.bench.workloads import Ask
from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError, shown
from kestrel.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class Answered:
    latency_s: float
    """As the client saw it: from the call, the picture still encoded, to the result."""
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of one run."""

    answered: Sequence[Answered]
    seconds: float

    def figures(self) -> dict[str, float | int]:
        """The columns of a row that come from the clients."""
        metrics = [one.metrics for one in self.answered]
        output_tokens = sum(m.output_tokens for m in metrics)
        gaps_s = [gap for m in metrics for gap in m.token_intervals_s]
        return {
            "seconds": self.seconds,
            "req_per_s": len(metrics) / self.seconds,
            **percentiles("latency", [one.latency_s * 1000 for one in self.answered], (50, 95)),
            **percentiles("ttft", [m.ttft_ms for m in metrics], (50, 95)),
            **percentiles("token_gap", [gap * 1000 for gap in gaps_s], (50, 99)),
            "input_tokens": sum(m.input_tokens for m in metrics),
            "cached_tokens": sum(m.cached_tokens for m in metrics),
            "output_tokens": output_tokens,
            "tokens_per_s": output_tokens / self.seconds,
        }


def percentiles(name: str, values: Sequence[float], shares: Sequence[int]) -> dict[str, float]:
    """Zero where there is nothing to measure, such as gaps between the tokens of one-token answers."""
    return {f"{name}_p{share}_ms": float(np.percentile(values, share)) if values else 0.0 for share in shares}


async def flood(engine: InferenceEngine, asks: Sequence[Ask]) -> Load:
    """All requests at once."""
    began_s = time.perf_counter()
    answered = await asyncio.gather(*(answer(engine, ask) for ask in asks))
    return Load(answered, time.perf_counter() - began_s)


async def closed(engine: InferenceEngine, asks: Sequence[Ask]) -> Load:
    """As many clients as the engine has rows, each with one request in flight."""
    pending = iter(asks)
    answered: list[Answered] = []

    async def client() -> None:
        for ask in pending:
            answered.append(await answer(engine, ask))

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(engine.max_batch_size)))
    return Load(answered, time.perf_counter() - began_s)


async def answer(engine: InferenceEngine, ask: Ask) -> Answered:
    began_s = time.perf_counter()
    result = await engine.run(ask.skill, **ask.fields)
    latency_s = time.perf_counter() - began_s
    yielded = result.metrics.output_tokens
    assert yielded == ask.num_tokens, f"a {ask.skill} gave {yielded} tokens, not {ask.num_tokens}"
    return Answered(latency_s, result.metrics)


Mode = Callable[[InferenceEngine, Sequence[Ask]], Awaitable[Load]]
MODES: dict[str, Mode] = {"flood": flood, "closed": closed}


def find_mode(name: str) -> Mode:
    mode = MODES.get(name)
    if mode is None:
        raise ConfigError("modes", f"{shown(name)} is not a mode; use one of: {', '.join(MODES)}")
    return mode
