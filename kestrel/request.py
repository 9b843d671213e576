"""What crosses the rooms: how to sample, one request, its measurements and what it yields. No tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kestrel.errors import RequestError, shown
from kestrel.grammar import Grammar
from kestrel.prompt_outputs import MAX_LOGPROBS, PromptOutputs, PromptReport
from kestrel.tokens import ContextItem, Token, num_positions


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 300
MAX_TEMPERATURE = 2.0
"""What clients of the OpenAI API may send; above it a text is hardly more than chance."""
MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MIN_REPETITION_PENALTY = 0.01
"""Scores are divided by it; far smaller ones would leave the range of float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end.

    Order: penalties → bias → suppress → temperature → softmax → top-k → top-p → min-p → draw.
    """

    max_new_tokens: int = 768
    """Token budget of each phase (reasoning and answer count apart). 0 is for requests about the prompt alone."""
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
    presence_penalty: float = 0.0
    """Taken once from the score of every text id generated so far, thinking included."""
    frequency_penalty: float = 0.0
    """Taken from the score of a text id as often as it was generated."""
    repetition_penalty: float = 1.0
    """Divides a positive score, multiplies a negative one, of every text id generated or in the prompt."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its score), each id once."""
    min_tokens: int = 0
    """Answer tokens before one that ends the answer may be sampled. A text of `stop` ends it all the same."""
    ignore_eos: bool = False
    """Never sample the end id: the answer ends by its budget or by a stop."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end an answer, wherever the end id would; not part of the text."""
    stop: tuple[str, ...] = ()
    """The answer ends right before the first of these texts. Decided by the skill, on the host."""

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_new_tokens, 0, 2**31 - 1)
        _require_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0 (got 0); use temperature=0 for the most likely token")
        _require_int("top_k", self.top_k, 0, 2**31 - 1)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        _require_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                "min_tokens", f"must not exceed max_tokens ({self.max_new_tokens}) (got {self.min_tokens})"
            )
        self._check_lists()

    def _check_lists(self) -> None:
        lists = (
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIAS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("stop", self.stop, MAX_STOPS),
        )
        for name, entries, most in lists:
            if len(entries) > most:
                raise RequestError(name, f"has {len(entries)} entries; at most {most} are possible")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias", "names an id twice; give each id once")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise RequestError("logit_bias", f"of id {token_id} must be from -100 to 100 (got {shown(bias)})")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    "stop", f"must be texts of 1 to {MAX_STOP_CHARACTERS} characters (got {shown(text)})"
                )

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the model's own distribution: before penalties, bias, suppression, temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """Sequences share cached KV only inside one namespace."""

    adapter: str | None = None
    tenant: str | None = None


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
    """Further fields, lists so long that making them would hold up the batch: whoever takes the result makes them."""


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
    items: tuple[ContextItem, ...]
    grammar: Grammar
    sampling: SamplingParams
    consumer: TokenConsumer
    images: Mapping[str, Any] = field(default_factory=dict)
    """Decoded pictures by digest, for the runtime; the scheduler never looks inside."""
    constraint: Constraint | None = None
    tenant: str | None = None
    adapter: AdapterUse | None = None
    priority: int = 0
    """Lower runs sooner; every `priority_ageing_s` of waiting counts as one level."""
    submitted_s: float = field(default_factory=time.monotonic)
    prompt_outputs: PromptOutputs | None = None
    is_read_along: bool = False
    """Someone reads the answer along: while it is written, other requests' prompts are computed in small portions."""
    num_prompt_positions: int = field(init=False)

    @property
    def namespace(self) -> CacheNamespace:
        return CacheNamespace(None if self.adapter is None else self.adapter.key, self.tenant)

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
    finish_reason: FinishReason | None = None
    output: SkillOutput | None = None
    metrics: RequestMetrics | None = None
    error: BaseException | None = None
