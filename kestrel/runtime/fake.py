"""A runtime whose tokens can be worked out by hand, for tests and for measuring the scheduler alone.

Every position has a value: a text token its id, a coordinate `round(1024·value)`, a size the sum of its two, position k
of an image span `int(digest[:4], 16) + k`. The KV slot of a position holds the running sum of values up to it, read
through the row's page table, so a wrong page gives a wrong token. The token sampled after position p is
`(running sum at p + p) mod vocab_size`, then moved to an id that the grammar, the row's mask and its own id lists
allow; where they leave none, the row fails. Example (vocab 10): prompt 3, 4 gives running sums 3, 7, so the first token
is (7 + 1) mod 10 = 8; fed at position 2, the sum is 15 and the next is 7.

A row with an adapter adds the adapter's number (see `adapter_number`) to the value of each of its positions.

For a row with penalties or a bias ids have scores: vocab_size for that token, one less for each id after it, around the
circle. The token is then the id with the best score after penalties and bias, the first one from that token on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kestrel.errors import NumericalError
from kestrel.grammar import END, Carries, State
from kestrel.request import FinishReason, PromptReport, ScoredToken, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.runtime.contract import (
    PictureSlice,
    PrefillChunk,
    PromptPart,
    RowOutput,
    RowStart,
    RuntimeLimits,
    StepOutput,
    StepPlan,
)
from kestrel.runtime.prompt_targets import first_pooled, scored_ids
from kestrel.settings import SamplingParams
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, Token

NUM_CROPS = 5
"""Of every picture."""


@dataclass(slots=True)
class FakeStep:
    step_id: int
    output: StepOutput


@dataclass(slots=True)
class _Row:
    start: RowStart
    state: int
    spent: int
    generated: int
    pages: list[int]
    last: Token | None = None
    failed: bool = False
    said: Counter[int] = field(default_factory=Counter)


class FakeRuntime:
    def __init__(self, limits: RuntimeLimits, vocab_size: int = 1000, coord_id: int = 5, size_id: int = 6) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._coord_id = coord_id
        self._size_id = size_id
        self._slots = [0] * (limits.num_pages * limits.page_size)
        self._rows: dict[int, _Row] = {}
        self._adapter_in: dict[int, str] = {}
        self._masks: Mapping[int, bytes] = {}
        self._next_collect = 0
        self.num_positions_computed = 0
        self._num_crops = NUM_CROPS
        self.sliced_crops: Counter[str] = Counter()
        self.kept_ahead: set[str] = set()
        """Pictures of requests without a row that are encoded."""
        self.encodes_ahead = False
        """Whether one is being encoded still, so that no other is begun."""
        self.num_encoded: Counter[str] = Counter()
        """How often each picture was encoded, at whatever time."""
        self.failing_digests: dict[str, Exception] = {}

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> FakeStep:
        output = StepOutput(plan.step_id)
        self._masks = plan.masks
        for load in plan.adapter_loads:
            assert 0 <= load.slot < self._limits.num_adapter_slots, "no such adapter slot"
            self._adapter_in[load.slot] = load.key
        for start in plan.starts:
            self._rows[start.row] = _Row(start, start.grammar_state, start.phase_spent, start.num_generated, [])
            self._rows[start.row].said.update(start.generated_ids)
        for write in plan.page_writes:
            pages = self._rows[write.row].pages
            assert write.index <= len(pages), "page table written with a gap"
            pages[write.index : write.index + len(write.pages)] = write.pages
        for copy in plan.page_copies:
            self._copy_page(copy.source, copy.target)
        for slice_ in plan.picture_slices:
            self.sliced_crops[slice_.digest] += self._crops_of(slice_)
        self._encode_ahead(plan)
        for chunk in plan.prefill:
            if chunk.row not in output.failures:
                self._prefill(chunk, output)
        for decode in plan.decode:
            row = self._rows[decode.row]
            if row.failed:
                continue
            assert row.last is not None, "decode before prefill"
            self._write(row, decode.position, item_value(row.last))
            self._sample(decode.row, decode.position, output)
        return FakeStep(plan.step_id, output)

    def has_encoded(self, digest: str) -> bool:
        return digest in self.kept_ahead or self.sliced_crops[digest] >= self._num_crops

    def _crops_of(self, slice_: PictureSlice) -> int:
        return slice_.num_crops(self._num_crops - self.sliced_crops[slice_.digest])

    def _encode_ahead(self, plan: StepPlan) -> None:
        self.kept_ahead -= set(plan.unwanted_pictures)
        if plan.picture_ahead is None:
            return
        assert plan.only_decodes, "a picture ahead takes the time of others"
        assert not self.has_encoded(plan.picture_ahead.digest), "encoded twice"
        if not self.encodes_ahead:
            self.kept_ahead.add(plan.picture_ahead.digest)
            self.num_encoded[plan.picture_ahead.digest] += 1
        assert len(self.kept_ahead) <= self._limits.pictures_ahead, "more are kept than there is memory for"

    def _take_picture(self, digest: str) -> None:
        """For its prefill: what was not encoded is encoded now."""
        self.num_encoded[digest] += digest not in self.kept_ahead
        self.kept_ahead.discard(digest)
        self.sliced_crops.pop(digest, None)

    def collect(self, step: FakeStep) -> StepOutput:
        assert step.step_id >= self._next_collect, "steps must be collected in order"
        self._next_collect = step.step_id + 1
        return step.output

    def _prefill(self, chunk: PrefillChunk, output: StepOutput) -> None:
        row = self._rows[chunk.row]
        position = chunk.start
        for item in chunk.items:
            if isinstance(item, ImageSpan):
                self._take_picture(item.digest)
                if item.digest in self.failing_digests:
                    output.failures[chunk.row] = self.failing_digests[item.digest]
                    row.failed = True
                    return
                for k in range(item.num_positions):
                    self._write(row, position + k, int(item.digest[:4], 16) + k)
                position += item.num_positions
            else:
                self._write(row, position, item_value(item))
                position += 1
        if chunk.prompt_outputs is not None:
            sums = [self._slots[self._slot(row, p)] for p in range(chunk.start, position)]
            part = fake_prompt_part(chunk, sums, self._vocab_size, self._coord_id, self._size_id)
            output.prompt_parts.append(part)
        if chunk.samples:
            self._sample(chunk.row, position - 1, output)

    def _sample(self, row_index: int, position: int, output: StepOutput) -> None:
        row = self._rows[row_index]
        candidate = self._weighed(row, (self._slots[self._slot(row, position)] + position) % self._vocab_size)
        sampled = self._pick(row, candidate, self._masks.get(row_index))
        if sampled is None:
            row.last, row.failed = TextToken(0), True
            output.failures[row_index] = NumericalError("no token is allowed")
        else:
            output.rows.append(self._advance(row_index, position, sampled))

    def _advance(self, row_index: int, position: int, sampled: int) -> RowOutput:
        row = self._rows[row_index]
        grammar, budget = row.start.grammar, row.start.sampling.max_new_tokens
        state = grammar.states[row.state]
        if row.spent >= budget and state.when_spent is not None:
            sampled = state.when_spent
        emitted, goto = grammar.advance(row.state, sampled)
        if goto == END or (state.end_ids and sampled in row.start.sampling.stop_token_ids):
            row.last = TextToken(emitted)  # a step already in flight still feeds something
            logprobs = _logprobs(row)
            return RowOutput(row_index, None, FinishReason.STOP, row.state, row.spent, logprobs, end_id=emitted)
        token = self._typed(state, emitted, position)
        row.said.update([emitted] if isinstance(token, TextToken) else [])
        changes_phase = grammar.states[goto].phase != state.phase
        row.spent = 0 if changes_phase else row.spent + 1
        row.state, row.last = goto, token
        row.generated += 1
        spent_out = row.spent >= budget and grammar.states[goto].when_spent is None
        ended = spent_out or row.generated >= row.start.max_total_tokens
        reason = FinishReason.LENGTH if ended else None
        return RowOutput(row_index, token, reason, goto, row.spent, _logprobs(row))

    def _weighed(self, row: _Row, candidate: int) -> int:
        """The candidate, or the id that penalties and bias put before it."""
        sampling = row.start.sampling
        if not sampling.has_penalties and not sampling.logit_bias:
            return candidate
        bias = dict(sampling.logit_bias)
        seen = {*row.start.prompt_ids, *row.said}

        def score(token_id: int) -> float:
            plain = self._vocab_size - (token_id - candidate) % self._vocab_size
            repeated = plain / sampling.repetition_penalty if token_id in seen else plain
            count = row.said[token_id]
            penalty = sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
            return repeated - penalty + bias.get(token_id, 0.0)

        circle = ((candidate + k) % self._vocab_size for k in range(self._vocab_size))
        return max(circle, key=score)

    def _pick(self, row: _Row, candidate: int, mask: bytes | None) -> int | None:
        """The first permitted id from the candidate on, or that of a short list; None when there is none."""
        sampling, state = row.start.sampling, row.start.grammar.states[row.state]
        only, never = sampling.allowed_ids, (sampling.suppressed_ids, state.suppressed)
        too_early = early_ends(state, sampling, row.spent)

        def is_permitted(token_id: int) -> bool:
            is_listed = not only or token_id in only
            return is_listed and not any(token_id in ids for ids in never) and _permits(mask, token_id)

        if state.allowed is not None:
            permitted = [token_id for token_id in state.allowed if is_permitted(token_id)]
            timely = [token_id for token_id in permitted if token_id not in too_early] or permitted
            return timely[candidate % len(timely)] if timely else None
        circle = [(candidate, self._vocab_size), (0, candidate)]
        late = None
        for token_id in (token_id for part in circle for token_id in range(*part)):
            if is_permitted(token_id):
                if token_id not in too_early:
                    return token_id
                late = token_id if late is None else late
        return late

    def _typed(self, state: State, emitted: int, position: int) -> Token:
        if emitted == self._coord_id and state.carries & Carries.COORD:
            return CoordToken((position * 37 % 1024) / 1024)
        if emitted == self._size_id and state.carries & Carries.SIZE:
            return SizeToken((position * 11 % 1024) / 1024, (position * 13 % 1024) / 1024)
        return TextToken(emitted)

    def _write(self, row: _Row, position: int, value: int) -> None:
        before = self._slots[self._slot(row, position - 1)] if position else 0
        slot = row.start.adapter_slot
        extra = 0 if slot is None else adapter_number(self._adapter_in[slot])
        self._slots[self._slot(row, position)] = before + value + extra
        self.num_positions_computed += 1

    def _slot(self, row: _Row, position: int) -> int:
        page, offset = divmod(position, self._limits.page_size)
        return row.pages[page] * self._limits.page_size + offset

    def _copy_page(self, source: int, target: int) -> None:
        size = self._limits.page_size
        self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]


class NullConsumer:
    """The skill of a request whose answer nobody wants: takes tokens and keeps none."""

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        return StreamDelta()

    def consume_prompt(self, report: PromptReport) -> None:
        return None

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        return None

    def flush(self) -> StreamDelta | None:
        return None

    def finish(self, reason: FinishReason) -> SkillOutput:
        return SkillOutput({}, "")


def adapter_number(key: str) -> int:
    """What the adapter with this key adds to the value of a position."""
    return 1 + zlib.crc32(key.encode()) % 89


def early_ends(state: State, sampling: SamplingParams, spent: int) -> set[int]:
    """Ids that would end the row but may not yet."""
    ends = set(state.end_ids) if sampling.ignore_eos or spent < sampling.min_tokens else set()
    return ends | set(sampling.stop_token_ids) if state.end_ids and spent < sampling.min_tokens else ends


def _logprobs(row: _Row) -> TokenLogprobs | None:
    return None if row.start.sampling.logprobs is None else TokenLogprobs(-1.0)


def _permits(mask: bytes | None, token_id: int) -> bool:
    return mask is None or (token_id // 8 < len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1))


def item_value(item: ContextItem) -> int:
    match item:
        case TextToken(id=token_id):
            return token_id
        case CoordToken(value=value):
            return round(1024 * value)
        case SizeToken(width=width, height=height):
            return round(1024 * width) + round(1024 * height)
        case ImageSpan():
            raise AssertionError("an image span has one value per position")


# ---------------------------------------------------------------------- what it says about a prompt
# The hidden state of position p is (running sum at p, p). The token that would be sampled after p without a grammar has
# the log-probability -1 and rank 1; every other id has -2 and rank 2, the next ones of the vocabulary first.


LIKELY, UNLIKELY = -1.0, -2.0


def fake_prompt_part(
    chunk: PrefillChunk, running_sums: Sequence[int], vocab_size: int, coord_id: int, size_id: int
) -> PromptPart:
    """`running_sums` has one entry per position of the chunk."""
    assert chunk.prompt_outputs is not None
    positions = range(chunk.start, chunk.start + chunk.num_positions)
    predicted = [(total + position) % vocab_size for total, position in zip(running_sums, positions, strict=True)]
    num_top = min(chunk.prompt_outputs.logprobs or 0, vocab_size)
    scores = tuple(
        _score(predicted[local], token_id, num_top, vocab_size)
        for local, token_id in scored_ids(chunk, coord_id, size_id)
    )
    first = first_pooled(chunk)
    hidden_sum = (float(sum(running_sums[first:])), float(sum(positions[first:])))
    num_pooled = chunk.num_positions - first
    return PromptPart(chunk.row, scores, hidden_sum if num_pooled else (), num_pooled)


def _score(predicted: int, token_id: int, num_top: int, vocab_size: int) -> ScoredToken:
    top = tuple(((predicted + k) % vocab_size, UNLIKELY if k else LIKELY) for k in range(num_top))
    return ScoredToken(LIKELY, 1, top) if token_id == predicted else ScoredToken(UNLIKELY, 2, top)
