"""What the scheduler and a runtime say to each other: a plan goes in, typed tokens come out. No torch.

A sequence keeps one *row* from its start to its end. Its last token, grammar state, spent budget and page table live on
the device under that row, so a step can be launched before the host has seen the previous one's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kestrel.grammar import Grammar
from kestrel.request import FinishReason, PromptOutputs, ScoredToken, TokenLogprobs
from kestrel.settings import SamplingParams
from kestrel.tokens import ContextItem, Token


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    max_batch_size: int
    max_seq_length: int
    num_pages: int
    page_size: int
    max_prefill_tokens: int
    """Prefill positions one step may hold; a single image span may exceed it."""
    steps_in_flight: int
    """1: the next step is planned while one runs. 0: when it is over."""
    num_adapter_slots: int = 0
    """Adapters that can be in use at the same time."""
    streaming_prefill_tokens: int = 0
    """Prefill positions of a step while an answer is streamed; 0: as at other times."""
    paces_pictures: bool = False
    """Pictures take seconds: they are encoded in slices, in a third of the time at most beside a stream."""
    pictures_ahead: int = 0
    """Pictures of requests without a row that may be kept encoded; 0: they are encoded when a row prefills them."""
    launch_waits: bool = True
    """Of a runtime with none in flight: a step has its results when it is launched. False: it runs beside the host."""

    @property
    def max_positions(self) -> int:
        """The longest sequence that fits both the context and the page pool."""
        return min(self.max_seq_length, self.num_pages * self.page_size)


@dataclass(frozen=True, slots=True)
class RowStart:
    """(Re)initialises a row. After a preemption the counters say where the sequence stood."""

    row: int
    grammar: Grammar
    sampling: SamplingParams
    max_total_tokens: int
    """Tokens the row may emit over all phases: what is left of the context."""
    grammar_state: int = 0
    phase_spent: int = 0
    num_generated: int = 0
    prompt_ids: tuple[int, ...] = ()
    """Text ids of the prompt that a repetition penalty covers; empty for a row without penalties."""
    generated_ids: tuple[int, ...] = ()
    """Text ids emitted before a preemption, in order; empty for a row without penalties."""
    adapter_slot: int | None = None
    """The slot whose adapter the row's positions go through; None: the base model alone."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Puts an adapter into a slot that no row uses."""

    slot: int
    key: str
    """Names the adapter's content."""
    weights: Any


@dataclass(frozen=True, slots=True)
class PageCopy:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Puts `pages` into a row's page table, from `index` on."""

    row: int
    index: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive context items of one row: either one image span (bidirectional) or tokens (causal)."""

    row: int
    start: int
    items: Sequence[ContextItem]
    num_positions: int
    samples: bool
    """Whether the chunk ends the known context, so that its last position yields a token."""
    images: Mapping[str, Any] = field(default_factory=dict)
    """Pictures of the request by digest; a chunk of tokens needs none."""
    prompt_outputs: PromptOutputs | None = None
    """What to tell about the chunk's positions, as a `PromptPart`."""
    following: ContextItem | None = None
    """The prompt's item after the chunk, which the chunk's last position predicts; None at the end of the prompt."""


POSITIONS_PER_CROP = 128
"""Encoding a crop takes about as long as prefilling so many positions."""


@dataclass(frozen=True, slots=True)
class PictureSlice:
    """Encodes some more crops of a picture that a later step prefills."""

    digest: str
    image: Any
    max_crops: int

    def num_crops(self, num_left: int) -> int:
        """Of so many that are left. Slices of this size are made as large as each other: steps take as long then."""
        num_slices = -(-num_left // self.max_crops)
        return -(-num_left // max(1, num_slices))


@dataclass(frozen=True, slots=True)
class WaitingPicture:
    """The picture of a request that has no row yet."""

    digest: str
    image: Any


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One more token for a row whose last token is on the device; `position` is where that token goes."""

    row: int
    position: int


@dataclass(slots=True)
class StepPlan:
    """One launch. Applied in this order: adapter loads, starts, page writes, page copies, forward, sampling."""

    step_id: int
    starts: list[RowStart] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    """By row: the ids it may sample at most, packed as `TokenConstraint.allowed`; its grammar still holds."""
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    picture_slices: list[PictureSlice] = field(default_factory=list)
    unwanted_pictures: list[str] = field(default_factory=list)
    """Digests of pictures encoded ahead that nobody waits for any more."""
    picture_ahead: WaitingPicture | None = None
    """Encoded beside a step that only decodes and kept until it is prefilled or unwanted; left out while the one before
    is still being encoded."""
    is_told_whole: bool = False
    """Collected when all its work is over, and not as soon as its tokens are known: what is left of a step would come
    before the next token of a stream, together with all of the next step."""

    @property
    def is_empty(self) -> bool:
        return not self.prefill and not self.decode and not self.picture_slices

    @property
    def only_decodes(self) -> bool:
        return bool(self.decode) and not self.prefill and not self.picture_slices


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row sampled. `token` is None when the end was sampled; `finish` is None while the row goes on."""

    row: int
    token: Token | None
    finish: FinishReason | None
    grammar_state: int
    phase_spent: int
    logprobs: TokenLogprobs | None = None
    end_id: int | None = None
    """The id that ended the row, when `token` is None."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What one prefill chunk tells about its prompt: log-probabilities of the tokens after each of its positions, and
    the sum of the hidden states of those that count."""

    row: int
    scores: Sequence[ScoredToken]
    hidden_sum: tuple[float, ...]
    num_pooled: int


@dataclass(slots=True)
class StepOutput:
    """`failures` names rows whose own input made the step fail for them (a damaged picture); the others went on."""

    step_id: int
    rows: list[RowOutput] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    """A row may have several, which stand in the order of its chunks."""


class InFlightStep(Protocol):
    @property
    def step_id(self) -> int: ...


StepT = TypeVar("StepT", bound=InFlightStep)


class Runtime(Protocol[StepT]):
    """Runs plans in the order they are launched. `collect` waits for a step; each is collected once, in order."""

    @property
    def limits(self) -> RuntimeLimits: ...

    def launch(self, plan: StepPlan) -> StepT: ...

    def collect(self, step: StepT) -> StepOutput: ...

    def has_encoded(self, digest: str) -> bool:
        """Whether a picture was encoded ahead, or slices have named all its crops, or it failed: then prefilling tries
        again, and tells. What slices made is known until it is prefilled, or until several others have come after it.
        """
        ...
