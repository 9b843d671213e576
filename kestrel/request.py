"""What crosses the rooms: how to sample, one request, its measurements and what it yields. No tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kestrel.errors import RequestError, shown
from kestrel.grammar import Grammar
from kestrel.tokens import ContextItem, Token, num_positions


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


MAX_LOGPROBS = 64
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Order: suppress → temperature → softmax → top-k → top-p → min-p → draw."""

    max_new_tokens: int = 768
    """Token budget of each phase (reasoning and answer count apart)."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of likely tokens whose probability reaches this; the token that crosses it stays."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int = 0
    """Same seed, same request: same text, whatever else is in the batch."""
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of the chosen token and of the k most likely ones."""
    allowed_ids: tuple[int, ...] = ()
    """If not empty, only these ids may be sampled."""
    suppressed_ids: tuple[int, ...] = ()
    """These ids are never sampled."""

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_new_tokens, 1, 2**31 - 1)
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0 (got 0); use temperature=0 for the most likely token")
        _require_int("top_k", self.top_k, 0, 2**31 - 1)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the model's own distribution, before suppression and temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """Sequences share cached KV only inside one namespace."""

    adapter: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one token added to a stream: text, or a typed event (`kind` other than "text")."""

    text: str = ""
    kind: str = "text"
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SkillOutput:
    """A finished skill: `fields` is the public result, `text` its plain-text rendering."""

    fields: dict[str, Any]
    text: str


class TokenConsumer(Protocol):
    """The skill's side of one request. Called on the engine's worker thread, one token at a time, in order."""

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None: ...

    def flush(self) -> StreamDelta | None: ...

    def finish(self, reason: FinishReason) -> SkillOutput: ...


class TokenConstraint(Protocol):
    """What an answer must match, followed on the host token by token. It survives a preemption of its sequence."""

    @property
    def allowed(self) -> bytes:
        """Ids that may come next: bit k % 8 of byte k // 8 stands for id k, and ids past the end are forbidden.

        The end id is among them when the answer may end here, and alone when it must.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The next token. Raises RequestError when the answer cannot be followed any further."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint and the phase of the grammar it holds in: thinking before an answer is free."""

    tokens: TokenConstraint
    phase: int = 0


@dataclass(slots=True)
class GenerationRequest:
    """One sequence to generate, ready for the scheduler."""

    request_id: str
    items: tuple[ContextItem, ...]
    grammar: Grammar
    sampling: SamplingParams
    consumer: TokenConsumer
    images: Mapping[str, Any] = field(default_factory=dict)
    """Decoded pictures by digest, for the runtime; the scheduler never looks inside."""
    constraint: Constraint | None = None
    namespace: CacheNamespace = CacheNamespace()
    priority: int = 0
    """Lower runs sooner; every `priority_ageing_s` of waiting counts as one level."""
    submitted_s: float = field(default_factory=time.monotonic)
    num_prompt_positions: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.items:
            raise RequestError("prompt", "is empty; give at least one token")
        self.num_prompt_positions = num_positions(self.items)


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request. `ttft_ms` runs from submission; `queue_time_ms` until its first step."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_time_ms: float = 0.0
    prefill_time_ms: float = 0.0
    decode_time_ms: float = 0.0
    ttft_ms: float = 0.0
    num_preemptions: int = 0

    @property
    def processing_latency_s(self) -> float:
        return (self.prefill_time_ms + self.decode_time_ms) / 1000.0

    @property
    def ttft_s(self) -> float:
        return self.ttft_ms / 1000.0

    @property
    def decode_latency_s(self) -> float:
        return self.decode_time_ms / 1000.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second of decoding; 0 when there was no decoding."""
        if self.decode_time_ms <= 0.0 or self.output_tokens < 2:
            return 0.0
        return (self.output_tokens - 1) / self.decode_latency_s


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """One thing the scheduler has to say about one request."""

    request_id: str
    delta: StreamDelta | None = None
    token_index: int = 0
    finish_reason: FinishReason | None = None
    output: SkillOutput | None = None
    metrics: RequestMetrics | None = None
    error: BaseException | None = None
