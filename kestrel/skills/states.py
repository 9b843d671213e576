"""How the built-in skills turn tokens into streams and results: what all share, plain text, and thinking first."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile, SkillState
from kestrel.skills.logprobs import LogprobLedger, TextPlace
from kestrel.skills.text_stream import TextStream, text_stream
from kestrel.tokens import CoordToken, Token


def compact_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


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

    def __init__(self, profile: ModelProfile, sampling: SamplingParams, field: str) -> None:
        super().__init__(profile, sampling)
        self._field = field
        self._stream = text_stream(profile.tokenizer, sampling.stop)

    def place(self, token: Token) -> TextPlace | None:
        return TextPlace("text", self._stream.num_characters)

    def num_printed(self, kind: str) -> int:
        return self._stream.num_printed

    def take(self, token: Token) -> StreamDelta | None:
        chunk = self._stream.push(self.profile.id_of(token))
        return text_delta(chunk, ends=self._stream.is_stopped)

    def rest(self) -> StreamDelta | None:
        return text_delta(self._stream.flush(), ends=self._stream.is_stopped)

    def output(self) -> SkillOutput:
        return SkillOutput({self._field: self._stream.text}, self._stream.text)


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
        return text_delta(self._thoughts.push(emitted, coordinate), "reasoning")

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
        return SkillOutput(fields, answer, num_reasoning_tokens=self._num_thinking)


class _Chunk:
    """A stretch of thinking between two grounding marks and the coordinates in it."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.coordinates: list[float] = []


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

    def flush(self) -> str:
        return self._chunks[-1].stream.flush()

    def result(self) -> tuple[str, list[dict[str, Any]]]:
        """The text, and for each chunk with a whole point its character range and points."""
        text = ""
        grounding: list[dict[str, Any]] = []
        for chunk in self._chunks:
            start = len(text)
            text += chunk.stream.text
            values = chunk.coordinates
            points = [[values[i], values[i + 1]] for i in range(0, len(values) - 1, 2)]
            if points:
                grounding.append({"start_idx": start, "end_idx": len(text), "points": points})
        return text, grounding
