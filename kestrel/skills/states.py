"""How the built-in skills turn tokens into streams and results: what all share, plain text, and thinking first.

Text is printed one token at a time, whole words only, never half a character: after each token the text so far
- whole, when it ends with a line break or with a CJK ideograph;
- else up to and including its last blank.
The joined chunks equal the decoded whole, or what comes before the first stop string.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile, SkillState, Tokenizer
from kestrel.skills.logprobs import LogprobLedger, TextPlace
from kestrel.tokens import CoordToken, SizeToken, Token

REPLACEMENT = "\ufffd"
_CJK_RANGES = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x2F800, 0x2FA1F))
_FIRST_CJK = 0x3400
_MAX_TAIL = 64
_KEPT_TAIL = 8


class TextStream:
    """Only the ids since the last settled character are decoded again, so a long text costs linear time."""

    def __init__(self, tokenizer: Tokenizer, *, by_words: bool = True) -> None:
        """Without `by_words` every whole character is printed at once."""
        self._tokenizer = tokenizer
        self._by_words = by_words
        self._tail: list[int] = []  # ids still decoded together; the first may be settled context
        self._context = ""  # the settled text at the start of the tail
        self._fresh = ""  # the rest of the tail's text, which the next token can still change
        self._settled = ""  # final text that is not fully printed yet
        self._printed = 0  # characters of settled + fresh that were handed out
        self._chunks: list[str] = []
        self._num_in_chunks = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete and takes no more ids."""
        return False

    @property
    def stop_text(self) -> str | None:
        """The stop string that completed it."""
        return None

    @property
    def num_printed(self) -> int:
        """Characters handed out so far."""
        return self._num_in_chunks

    @property
    def num_characters(self) -> int:
        """Whole characters so far, handed out or not: where the text of the next id begins."""
        return self._num_in_chunks + len(self.unprinted.rstrip(REPLACEMENT))

    @property
    def text(self) -> str:
        """Everything so far, printed or not."""
        return "".join(self._chunks) + self.unprinted

    @property
    def unprinted(self) -> str:
        """What was not handed out yet; its last characters may still change."""
        return (self._settled + self._fresh)[self._printed :]

    def push(self, token_id: int) -> str:
        """Take one id; return what can be printed now, often nothing."""
        before = self._fresh
        self._tail.append(token_id)
        self._fresh = self._tokenizer.decode(self._tail)[len(self._context) :]
        if self._fresh == before and not self._tokenizer.decode([token_id]):
            self._tail.pop()  # an id without text, such as a special one
            return ""
        chunk = self._print_up_to(self._printable_end())
        if not self._fresh.endswith(REPLACEMENT):
            self._settle(token_id)
        elif len(self._tail) > _MAX_TAIL:
            self._settle_broken_bytes()
        return chunk

    def _printable_end(self) -> int:
        text = self._settled + self._fresh
        return _end_of_words(text, self._printed) if self._by_words else len(text.rstrip(REPLACEMENT))

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character show as U+FFFD."""
        return self._print_up_to(len(self._settled) + len(self._fresh))

    def _print_up_to(self, end: int) -> str:
        chunk = (self._settled + self._fresh)[self._printed : end]
        self._printed = max(end, self._printed)
        if chunk:
            self._chunks.append(chunk)
            self._num_in_chunks += len(chunk)
        return chunk

    def _settle(self, token_id: int) -> None:
        """The text ends with a whole character: nothing that follows can change it."""
        self._settled = self.unprinted
        self._printed = 0
        self._fresh = ""
        # Some tokenizers drop the blank of a first word, so the last id stays as context. Part of a character does not:
        # others decode a run of bytes only as a whole.
        alone = self._tokenizer.decode([token_id])
        self._context = "" if REPLACEMENT in alone else alone
        self._tail = [token_id] if self._context else []

    def _settle_broken_bytes(self) -> None:
        """Keep the tail short under a run of bytes that form no characters: cut where both parts decode the same."""
        whole = self._context + self._fresh
        for cut in range(len(self._tail) - _KEPT_TAIL, len(self._tail) - 2 * _KEPT_TAIL, -1):
            head, rest = self._tokenizer.decode(self._tail[:cut]), self._tokenizer.decode(self._tail[cut:])
            if head + rest == whole:
                self._settled += head[len(self._context) :]
                self._tail, self._context, self._fresh = self._tail[cut:], "", rest
                return


def _end_of_words(text: str, printed: int) -> int:
    if len(text) > printed and (text.endswith("\n") or _is_cjk(text[-1])):
        return len(text)
    return max(text.rfind(" ", printed) + 1, printed)


def _is_cjk(character: str) -> bool:
    code = ord(character)
    return code >= _FIRST_CJK and any(low <= code <= high for low, high in _CJK_RANGES)


class StoppingTextStream(TextStream):
    """Text that ends right before the first of some strings, wherever tokens and characters are cut.

    The first is the one that begins first in the whole text. While what was seen last could still grow into a stop
    string it is not handed out; a found string counts once none that began before it can still be completed.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self._stops = stops
        self._held = ""  # printable text that is not handed out yet
        self._num_released = 0
        self._end: int | None = None  # where the text stops

    @property
    def text(self) -> str:
        return super().text[: self._end]

    @property
    def num_printed(self) -> int:
        return self._num_released

    @property
    def is_stopped(self) -> bool:
        return self._end is not None

    @property
    def stop_text(self) -> str | None:
        return stop_before(self.beyond, self._stops)

    @property
    def beyond(self) -> str:
        """What was seen from the stop string on."""
        return "" if self._end is None else super().text[self._end :]

    def push(self, token_id: int) -> str:
        if self.is_stopped:
            return ""
        self._held += super().push(token_id)
        seen = self._held + self.unprinted.rstrip(REPLACEMENT)  # half a character can still become any other
        found, open_from = first_stop(seen, self._stops), open_stop(seen, self._stops)
        if found is not None and found <= open_from:
            self._end = self._num_released + found
            return self._release(seen, found)
        return self._release(self._held, min(open_from, len(self._held)))

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        self._held += super().flush()
        found = first_stop(self._held, self._stops)
        if found is not None:
            self._end = self._num_released + found
        return self._release(self._held, len(self._held) if found is None else found)

    def _release(self, text: str, end: int) -> str:
        self._held = text[end:]
        self._num_released += end
        return text[:end]


class UnreadText(TextStream):
    """Text that nobody reads before its end: decoded once, as a whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        self._chunks = [self._tokenizer.decode(self._ids)]
        return ""


def text_stream(tokenizer: Tokenizer, stops: Sequence[str], *, by_words: bool = True) -> TextStream:
    return StoppingTextStream(tokenizer, stops) if stops else TextStream(tokenizer, by_words=by_words)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def stop_before(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that the text begins with: the shortest of several, which was complete first."""
    return min((stop for stop in stops if text.startswith(stop)), key=len, default=None)


def open_stop(text: str, stops: Sequence[str]) -> int:
    """Where the longest ending begins that could still grow into a stop string; the end of the text if none can."""
    first = len(text)
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1, first)
        first = at if at >= 0 else first
    return first


# ---------------------------------------------------------------------- states


def compact_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


def object_score(*placed_by: CoordToken | SizeToken) -> float:
    """How sure the model was of an object, 0 to 1: the geometric mean of the probabilities of the tokens that placed
    it, of which the first also says that there is one more object at all. Rounded, so that the batch does not show."""
    return round(math.exp(sum(token.logprob for token in placed_by) / len(placed_by)), 4)


class RecordingState(SkillState):
    """Notes the id of every token and, when asked for, its log-probabilities, then leaves it to `take`.

    `output` makes the result without log-probabilities.
    """

    def __init__(self, profile: ModelProfile, sampling: SamplingParams) -> None:
        self.profile = profile
        self.token_ids: list[int] = []
        self._ledger = None if sampling.logprobs is None else LogprobLedger(profile.tokenizer)

    @abstractmethod
    def take(self, token: Token) -> StreamDelta | None:
        """Take one token; return what it adds to a stream, if anything."""

    @abstractmethod
    def output(self) -> SkillOutput:
        """The result of all tokens so far."""

    def rest(self) -> StreamDelta | None:
        """What was held back from the stream."""
        return None

    def place(self, token: Token) -> TextPlace | None:
        """Where the text of a token that is about to be taken begins; None when it is no text."""
        return None

    def num_printed(self, kind: str) -> int:
        """Characters of this kind of text that the stream has got."""
        return 0

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        emitted = self.profile.id_of(token)
        self.token_ids.append(emitted)
        if self._ledger is None:
            return self.take(token)
        self._ledger.add(emitted, logprobs, self.place(token))
        delta = self.take(token)
        if delta is None:
            return None
        return replace(delta, logprobs=self._ledger.stream_up_to(delta.kind, self.num_printed(delta.kind)))

    def flush(self) -> StreamDelta | None:
        delta = self.rest()
        if self._ledger is None:
            return delta
        if delta is not None and delta.ends:
            self._ledger.cut(delta.kind, self.num_printed(delta.kind))
        kind, entries = self._ledger.stream_rest()
        if not entries:
            return delta
        return replace(delta or StreamDelta(kind=kind), logprobs=entries)

    def finish(self, reason: FinishReason) -> SkillOutput:
        output = self.output()
        if self._ledger is not None:
            output.fields["logprobs"] = self._ledger.entries
        return output


class TextState(RecordingState):
    """Streams text and returns it under `field`."""

    def __init__(self, profile: ModelProfile, sampling: SamplingParams, field: str, *, by_words: bool = True) -> None:
        super().__init__(profile, sampling)
        self._field = field
        self._stream = text_stream(profile.tokenizer, sampling.stop, by_words=by_words)

    def place(self, token: Token) -> TextPlace | None:
        return TextPlace("text", self._stream.num_characters)

    def num_printed(self, kind: str) -> int:
        return self._stream.num_printed

    def take(self, token: Token) -> StreamDelta | None:
        chunk = self._stream.push(self.profile.id_of(token))
        return text_delta(chunk, ends=self._stream.is_stopped)

    def rest(self) -> StreamDelta | None:
        return text_delta(self._stream.flush(), ends=self._stream.is_stopped)

    def nobody_reads(self) -> None:
        if type(self._stream) is TextStream and self._ledger is None:
            self._stream = UnreadText(self.profile.tokenizer)

    def output(self) -> SkillOutput:
        text = self._stream.text
        return SkillOutput({self._field: text}, text, stop_text=self._stream.stop_text)


def text_delta(text: str, kind: str = "text", *, ends: bool = False) -> StreamDelta | None:
    return StreamDelta(text, kind, ends=ends) if text or ends else None


class ReasoningState(RecordingState):
    """A question that is thought about first: thinking text, what it points at, then the answer.

    The ids of the query suffix part thinking from answer; they belong to neither. Stop strings end answers only.
    """

    def __init__(self, profile: ModelProfile, sampling: SamplingParams) -> None:
        super().__init__(profile, sampling)
        suffix = profile.templates["query"].suffix
        self._end_of_thinking = suffix[0]
        self._suffix_left = len(suffix)
        self._thoughts = _Thoughts(profile)
        self._answer = text_stream(profile.tokenizer, sampling.stop)
        self._num_thinking = 0

    @property
    def _answering(self) -> bool:
        return self._suffix_left == 0

    def place(self, token: Token) -> TextPlace | None:
        if self._answering:
            return TextPlace("text", self._answer.num_characters)
        if isinstance(token, CoordToken) or self._opens_answer(token):
            return None
        return TextPlace("reasoning", self._thoughts.num_characters)

    def num_printed(self, kind: str) -> int:
        return self._answer.num_printed if kind == "text" else self._thoughts.num_printed

    def take(self, token: Token) -> StreamDelta | None:
        emitted = self.profile.id_of(token)
        if self._answering:
            return text_delta(self._answer.push(emitted), ends=self._answer.is_stopped)
        self._num_thinking += 1
        if self._opens_answer(token):
            self._suffix_left -= 1
            return text_delta(self._thoughts.flush(), "reasoning")
        coordinate = token.value if isinstance(token, CoordToken) else None
        words = self._thoughts.push(emitted, coordinate)
        ground = None if coordinate is None else self._thoughts.new_ground
        return text_delta(words, "reasoning") if ground is None else StreamDelta(words, "reasoning", ground)

    def rest(self) -> StreamDelta | None:
        if self._answering:
            return text_delta(self._answer.flush(), ends=self._answer.is_stopped)
        return text_delta(self._thoughts.flush(), "reasoning")

    def _opens_answer(self, token: Token) -> bool:
        """Whether the token is an id of the suffix."""
        has_begun = self._suffix_left < len(self.profile.templates["query"].suffix)
        return has_begun or self.profile.id_of(token) == self._end_of_thinking

    def output(self) -> SkillOutput:
        text, grounding = self._thoughts.result()
        answer = self._answer.text
        fields = {"answer": answer, "reasoning": {"text": text, "grounding": grounding}}
        return SkillOutput(fields, answer, self._num_thinking, stop_text=self._answer.stop_text)


class _Chunk:
    """A stretch of thinking between two grounding marks and the coordinates in it."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.coordinates: list[float] = []

    def ground(self, start: int, values: Sequence[float]) -> dict[str, Any]:
        """Its characters, which begin at `start`, and the whole points among these of its coordinates."""
        points = [[values[i], values[i + 1]] for i in range(0, len(values) - 1, 2)]
        return {"start_idx": start, "end_idx": start + len(self.stream.text), "points": points}


class _Thoughts:
    """Thinking text in chunks; every grounding mark starts one and is its first id."""

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile
        regions = profile.regions
        self._marks = () if regions is None else (regions.start_ground, regions.end_ground)
        self._chunks = [_Chunk(TextStream(profile.tokenizer))]
        self._num_before = 0  # characters of the chunks before the last one

    @property
    def num_characters(self) -> int:
        return self._num_before + self._chunks[-1].stream.num_characters

    @property
    def num_printed(self) -> int:
        return self._num_before + self._chunks[-1].stream.num_printed

    def push(self, emitted_id: int, coordinate: float | None) -> str:
        rest = ""
        if emitted_id in self._marks:
            rest = self.flush()
            self._num_before = self.num_printed
            self._chunks.append(_Chunk(TextStream(self._profile.tokenizer)))
        if coordinate is not None:
            self._chunks[-1].coordinates.append(coordinate)
        return rest + self._chunks[-1].stream.push(emitted_id)

    @property
    def new_ground(self) -> dict[str, Any] | None:
        """The point that the last coordinate completes, and the characters so far that it belongs to."""
        chunk = self._chunks[-1]
        if len(chunk.coordinates) % 2:
            return None
        return {"grounding": chunk.ground(self._num_before, chunk.coordinates[-2:])}

    def flush(self) -> str:
        return self._chunks[-1].stream.flush()

    def result(self) -> tuple[str, list[dict[str, Any]]]:
        """The text, and for each chunk with a whole point its character range and points."""
        text = ""
        grounding: list[dict[str, Any]] = []
        for chunk in self._chunks:
            ground = chunk.ground(len(text), chunk.coordinates)
            text += chunk.stream.text
            if ground["points"]:
                grounding.append(ground)
        return text, grounding
