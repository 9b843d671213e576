"""What the engine benchmark asks, the clients that ask it, and the cases that it measures.

Every request yields a known number of tokens: ends are barred.

- chart9: a question of 14 words about a picture nobody has seen, which is cut into 9 crops; 750 positions on
  Moondream 2, 749 on Moondream 3
- same-image: many questions about one picture
- text: the question alone
- mixed-skills: questions, captions, points and boxes in turn, each about a fresh picture
- ids128, ids512, ids2000: so many random token ids, continued; nothing is shared between requests
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kestrel.errors import ConfigError, shown

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine
    from kestrel.request import RequestMetrics

SUITE_NAMES = ("h200", "tiny", "text")
"""Names of whole tables of cases."""
QUESTION = "What is the highest value shown by the bars in the left chart here?"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    skill: str
    fields: dict[str, Any]
    num_tokens: int
    """It yields exactly these."""


@dataclass(frozen=True, slots=True)
class Material:
    """What asks are made of."""

    pictures: Sequence[bytes]
    tokens: int
    end_ids: tuple[int, ...]
    """Of the model."""
    vocab_size: int = 0

    @property
    def text_settings(self) -> dict[str, Any]:
        return {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Workload:
    name: str
    pictures_for: Callable[[int], int]
    """From a number of requests to that of pictures."""
    ask: Callable[[Material, int], Ask]
    """The request with this index."""

    def asks(self, material: Material, count: int) -> list[Ask]:
        return [self.ask(material, index) for index in range(count)]


def find_workload(name: str) -> Workload:
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    known = ", ".join(workload.name for workload in WORKLOADS)
    raise ConfigError("workloads", f"{shown(name)} is not a workload; use one of: {known}")


def question_pieces() -> list[str]:
    """The question's words as vocabularies write them, for tokenizers that shall know each as one token."""
    from kestrel.models.tokenizer import BLANK  # noqa: PLC0415 - help reads this file

    first, *rest = QUESTION.removesuffix("?").split()
    return [first, *(BLANK + word for word in rest)]


def _query(material: Material, picture: bytes | None, question: str) -> Ask:
    fields = {"image": picture, "question": question, "reasoning": False, "settings": material.text_settings}
    return Ask("query", fields, material.tokens)


def _chart(material: Material, index: int) -> Ask:
    return _query(material, material.pictures[index], QUESTION)


def _same_image(material: Material, index: int) -> Ask:
    return _query(material, material.pictures[0], f"{index} {QUESTION}")


def _text(material: Material, index: int) -> Ask:
    return _query(material, None, f"{index} {QUESTION}")


def _mixed(material: Material, index: int) -> Ask:
    picture = material.pictures[index]
    kind = index % 4
    if kind == 0:
        return _query(material, picture, QUESTION)
    if kind == 1:
        return Ask(
            "caption", {"image": picture, "length": "normal", "settings": material.text_settings}, material.tokens
        )
    return _objects(material, picture, *(("point", 2) if kind == 2 else ("detect", 3)))


def _objects(material: Material, picture: bytes, skill: str, tokens_per_object: int) -> Ask:
    count = max(1, material.tokens // tokens_per_object)
    settings = {"max_objects": count, "suppressed_ids": list(material.end_ids)}
    return Ask(skill, {"image": picture, "object": "bar", "settings": settings}, count * tokens_per_object)


def _ids(num_ids: int, material: Material, index: int) -> Ask:
    """Ids below the first quarter are left out: control ids and bytes are among them."""
    import numpy as np  # noqa: PLC0415

    low = material.vocab_size // 4
    ids = np.random.default_rng(index).integers(low, material.vocab_size, num_ids).tolist()
    return Ask("complete", {"prompt": ids, "settings": material.text_settings}, material.tokens)


WORKLOADS = (
    Workload("chart9", lambda requests: requests, _chart),
    Workload("same-image", lambda requests: 1, _same_image),
    Workload("text", lambda requests: 0, _text),
    Workload("mixed-skills", lambda requests: requests, _mixed),
    *(Workload(f"ids{count}", lambda requests: 0, partial(_ids, count)) for count in (128, 512, 2000)),
)


# ---------------------------------------------------------------------- clients


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
    import numpy as np  # noqa: PLC0415

    return {f"{name}_p{share}_ms": float(np.percentile(values, share)) if values else 0.0 for share in shares}


async def flood(engine: InferenceEngine, asks: Sequence[Ask]) -> Load:
    """All requests at once."""
    import asyncio  # noqa: PLC0415

    began_s = time.perf_counter()
    answered = await asyncio.gather(*(answer(engine, ask) for ask in asks))
    return Load(answered, time.perf_counter() - began_s)


async def closed(engine: InferenceEngine, asks: Sequence[Ask]) -> Load:
    """As many clients as the engine has rows, each with one request in flight."""
    import asyncio  # noqa: PLC0415

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


async def streams(engine: InferenceEngine, asks: Sequence[Ask]) -> Load:
    """As `closed`, with somebody who reads each answer as it comes: tokens are to come evenly."""
    return await closed(engine, [replace(ask, fields={**ask.fields, "read_along": True}) for ask in asks])


Mode: TypeAlias = "Callable[[InferenceEngine, Sequence[Ask]], Awaitable[Load]]"
MODES: dict[str, Mode] = {"flood": flood, "closed": closed, "streams": streams}


def find_mode(name: str) -> Mode:
    mode = MODES.get(name)
    if mode is None:
        raise ConfigError("modes", f"{shown(name)} is not a mode; use one of: {', '.join(MODES)}")
    return mode


# ---------------------------------------------------------------------- cases


REQUESTS_BY_BATCH = {1: 64, 4: 128, 16: 256, 64: 384}


@dataclass(frozen=True, kw_only=True)
class Case:
    workload: str
    mode: str
    max_batch_size: int
    tokens: int
    requests: int
    runs: int = 1
    """The fastest of them counts."""

    def __post_init__(self) -> None:
        find_workload(self.workload)
        find_mode(self.mode)
        counts = {"batch-sizes": self.max_batch_size, "tokens": self.tokens, "requests": self.requests}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(name, f"must be at least 1 (got {value})")


def default_requests(max_batch_size: int) -> int:
    """64, 128, 256 and 384 from batch sizes 1, 4, 16 and 64 on."""
    return max(count for size, count in REQUESTS_BY_BATCH.items() if size <= max_batch_size)


def cases_of(
    workloads: Sequence[str],
    modes: Sequence[str],
    batch_sizes: Sequence[int],
    tokens: Sequence[int],
    requests: int | None,
) -> Iterator[Case]:
    """Every combination, batch sizes outermost."""
    for max_batch_size in batch_sizes:
        count = default_requests(max_batch_size) if requests is None else requests
        for workload in workloads:
            for mode in modes:
                for num_tokens in tokens:
                    yield Case(
                        workload=workload,
                        mode=mode,
                        max_batch_size=max_batch_size,
                        tokens=num_tokens,
                        requests=count,
                    )
