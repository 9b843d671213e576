"""The state of a question that is thought about first: thinking text, what it points at, then the answer."""

from __future__ import annotations

from typing import Any

from kestrel.request import SkillOutput, StreamDelta
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile
from kestrel.skills.logprobs import TextPlace
from kestrel.skills.recording import RecordingState, token_id
from kestrel.skills.stop_strings import text_stream
from kestrel.skills.text_state import text_delta
from kestrel.skills.text_stream import TextStream
from kestrel.tokens import CoordToken, Token


class ReasoningState(RecordingState):
    """The ids of the query suffix part thinking from answer; they belong to neither. Stop strings end answers only."""

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
        emitted = token_id(self.profile.ids, token)
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
        return has_begun or token_id(self.profile.ids, token) == self._end_of_thinking

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
        self._marks = (profile.ids.start_ground, profile.ids.end_ground)
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
