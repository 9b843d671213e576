"""What crosses the rooms: one request, its measurements and what it yields. No tensors.

Position p of a prompt predicts the item after it. So a stretch of positions tells the log-probabilities of the items
that begin one position later, and the first item of a prompt has none.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, Protocol

from kestrel.errors import RequestError
from kestrel.grammar import Grammar
from kestrel.settings import SETTINGS, SamplingParams, integer
from kestrel.tokens import ContextItem, Token, num_positions

_POSITION = integer(0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What a request asks about its own prompt. Every position is then computed: none is read from the prefix cache."""

    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of every prompt token and of the k most likely ones in its place."""
    pool_from: int | None = None
    """None: no pooling; n ≥ 0: the hidden states after the final norm are summed from position n to the end."""

    def __post_init__(self) -> None:
        if self.logprobs is None and self.pool_from is None:
            raise RequestError("prompt_outputs", "asks for nothing; set logprobs or pool_from, or leave it out")
        if self.logprobs is not None:
            SETTINGS["logprobs"].kind("prompt_logprobs", self.logprobs)
        if self.pool_from is not None:
            _POSITION("pool_from", self.pool_from)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Natural-log probabilities of the model's own distribution where a prompt token stands.

    All come from one tensor, so `logprob == top[0][1]` tells exactly whether the token was the most likely one.
    """

    logprob: float
    rank: int
    """1 + how many ids are strictly likelier."""
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(slots=True, eq=False)
class PromptReport:
    """Adds up what consecutive stretches of one prompt say. Equal reports say the same, however it was cut."""

    stretches: list[Sequence[ScoredToken]] = field(default_factory=list)
    """As they came: a runtime may make a stretch's entries when they are first looked at."""
    hidden_sum: list[float] = field(default_factory=list)
    num_pooled: int = 0

    def add(self, scores: Sequence[ScoredToken], hidden_sum: Sequence[float], num_pooled: int) -> None:
        self.stretches.append(scores)
        if num_pooled:
            before = self.hidden_sum or [0.0] * len(hidden_sum)
            self.hidden_sum = [a + b for a, b in zip(before, hidden_sum, strict=True)]
            self.num_pooled += num_pooled

    @property
    def num_scores(self) -> int:
        return sum(len(stretch) for stretch in self.stretches)

    @property
    def scores(self) -> list[ScoredToken]:
        """One per token but the prompt's first item, in order. Coordinates and sizes are scored by their id; pictures
        are not. Looking at many takes a while, so not on the worker's thread."""
        return list(chain.from_iterable(self.stretches))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptReport):
            return NotImplemented
        ours, theirs = ((r.scores, r.hidden_sum, r.num_pooled) for r in (self, other))
        return ours == theirs

    @property
    def hidden_mean(self) -> list[float]:
        """Of the pooled positions, of which there must be some."""
        return [value / self.num_pooled for value in self.hidden_sum]


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the model's own distribution: before penalties, bias, suppression, temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of an answer, and where the decode rules stood behind it: enough to go on from there elsewhere."""

    token: Token
    grammar_state: int
    phase_spent: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """Sequences share cached KV only inside one namespace."""

    adapter: str | None = None
    tenant: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AdapterUse:
    """The adapter that a request goes through."""

    name: str
    """As users say it."""
    key: str
    """Names its content: a file that changed has another one."""
    weights: Any
    """For the runtime alone."""


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one token added to a stream: text, or a typed event (`kind` other than "text")."""

    text: str = ""
    kind: str = "text"
    data: Mapping[str, Any] | None = None
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """Of the tokens whose text begins in this piece; shaped as in the result (see `kestrel.skills.logprobs`)."""
    ends: bool = False
    """The skill is satisfied: its sequence stops here, with reason "stop", and gets no further token."""


@dataclass(frozen=True, slots=True)
class SkillOutput:
    """A finished skill: `fields` is the public result, `text` its plain-text rendering."""

    fields: dict[str, Any]
    text: str
    num_reasoning_tokens: int = 0
    """How many of the generated tokens were thinking."""
    late: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    """Lazy result fields, built on the caller's thread to avoid stalling the batch."""
    stop_text: str | None = None
    """The stop string that ended it."""


class TokenConsumer(Protocol):
    """The skill's side of one request. Called on the engine's worker thread, one token at a time, in order."""

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None: ...

    def consume_prompt(self, report: PromptReport) -> None:
        """Called once, before the first token, when the request asks for outputs of its prompt; else never."""
        ...

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        """The id that ended the sequence, which is no part of it. Called only when log-probabilities are asked for."""
        ...

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
    items: Sequence[ContextItem]
    grammar: Grammar
    sampling: SamplingParams
    consumer: TokenConsumer
    images: Mapping[str, Any] = field(default_factory=dict)
    """Decoded pictures by digest, for the runtime; the scheduler never looks inside."""
    constraint: Constraint | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    client: str | None = None
    """Who asks: clients take turns. All requests without one are one client's."""
    adapter: AdapterUse | None = None
    priority: int = 0
    """Lower runs sooner; every `priority_ageing_s` of waiting counts as one level."""
    submitted_s: float = field(default_factory=time.monotonic)
    prompt_outputs: PromptOutputs | None = None
    is_streaming: bool = False
    """Someone waits for each token: while it is written, prefill of other requests is split into small chunks."""
    has_reader: bool = True
    """False: nobody looks at the answer before its end, so the stream gets none of its parts."""
    tells_tokens: bool = False
    """Each part of the stream comes with the tokens that it was made of."""
    resumed: Sequence[GeneratedToken] = ()
    """The beginning of the answer, as another engine told it. What it made of the stream is not told again."""
    num_prompt_positions: int = field(init=False)

    @property
    def namespace(self) -> CacheNamespace:
        return CacheNamespace(None if self.adapter is None else self.adapter.key, self.tenant, self.cache_salt)

    def __post_init__(self) -> None:
        if not self.items:
            raise RequestError("prompt", "is empty; give at least one token")
        if self.sampling.max_new_tokens == 0 and self.prompt_outputs is None:
            raise RequestError("max_tokens", "must be at least 1 (got 0) unless outputs of the prompt are asked for")
        self.num_prompt_positions = num_positions(self.items)
        first = None if self.prompt_outputs is None else self.prompt_outputs.pool_from
        if first is not None and first >= self.num_prompt_positions:
            raise RequestError(
                "pool_from", f"{first} leaves no position of a prompt with {self.num_prompt_positions}; lower it"
            )


def require_free_id(request_id: str, *taken: Container[str]) -> None:
    """Refuse an id that another unanswered request has."""
    if any(request_id in ids for ids in taken):
        raise RequestError("request_id", f"{request_id!r} is in use; give each running request its own")


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
    token_intervals_s: list[float] = field(default_factory=list, repr=False)
    """Seconds from each token to the next, as the scheduler saw them."""

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
    tokens: tuple[GeneratedToken, ...] = ()
    """Since the last delta, when they are to be told."""
    finish_reason: FinishReason | None = None
    output: SkillOutput | None = None
    metrics: RequestMetrics | None = None
    error: BaseException | None = None
