"""Answers of models that think in their own text: a thought between two marks, if there is one, then the answer.

Line breaks right behind a mark belong to it. The opening mark counts before any answer only; later it is text. Stop
strings end answers and not thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.request import SkillOutput, StreamDelta
from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile, ThinkingIds, ThinkingTags
from kestrel.skills.logprobs import TextPlace
from kestrel.skills.states import RecordingState, StoppingTextStream, TextStream, text_delta, text_stream
from kestrel.tokens import Token


def thinking_state(
    profile: ModelProfile,
    sampling: SamplingParams,
    marks: ThinkingIds | ThinkingTags,
    *,
    is_thinking: bool,
    by_words: bool = True,
) -> RecordingState:
    """`is_thinking`: the prompt has opened a thought. `by_words`: how the answer is streamed."""
    if isinstance(marks, ThinkingIds):
        return ThinkingState(profile, sampling, marks, is_thinking=is_thinking, by_words=by_words)
    return TaggedThinkingState(profile, sampling, marks, is_thinking=is_thinking, by_words=by_words)


class ThinkingState(RecordingState):
    """The marks are ids."""

    def __init__(
        self,
        profile: ModelProfile,
        sampling: SamplingParams,
        marks: ThinkingIds,
        *,
        is_thinking: bool,
        by_words: bool = True,
    ) -> None:
        super().__init__(profile, sampling)
        self._marks = marks
        self._thoughts = TextStream(profile.tokenizer)
        self._answer = text_stream(profile.tokenizer, sampling.stop, by_words=by_words)
        self._is_thinking = self._has_thought = is_thinking
        self._follows_mark = is_thinking
        self._num_thinking = 0

    def place(self, token: Token) -> TextPlace | None:
        if self._is_format(self.profile.id_of(token)):
            return None
        if self._is_thinking:
            return TextPlace("reasoning", self._thoughts.num_characters)
        return TextPlace("text", self._answer.num_characters)

    def num_printed(self, kind: str) -> int:
        return self._answer.num_printed if kind == "text" else self._thoughts.num_printed

    def take(self, token: Token) -> StreamDelta | None:
        token_id = self.profile.id_of(token)
        is_mark = self._is_mark(token_id)
        self._num_thinking += self._is_thinking or is_mark
        if not self._is_format(token_id):
            self._follows_mark = False
            if self._is_thinking:
                return text_delta(self._thoughts.push(token_id), "reasoning")
            return text_delta(self._answer.push(token_id), ends=self._answer.is_stopped)
        if not is_mark:
            return None
        self._follows_mark = self._has_thought = True
        self._is_thinking = token_id == self._marks.opens
        return None if self._is_thinking else text_delta(self._thoughts.flush(), "reasoning")

    def rest(self) -> StreamDelta | None:
        if self._is_thinking:
            return text_delta(self._thoughts.flush(), "reasoning")
        return text_delta(self._answer.flush(), ends=self._answer.is_stopped)

    def _is_format(self, token_id: int) -> bool:
        """Whether the id has no part in thought or answer."""
        is_break = self._follows_mark and not self.profile.tokenizer.token_bytes(token_id).strip(b"\n")
        return is_break or self._is_mark(token_id)

    def _is_mark(self, token_id: int) -> bool:
        if self._is_thinking:
            return token_id == self._marks.closes
        return token_id == self._marks.opens and not self._has_thought and not self._answer.text.strip()

    def output(self) -> SkillOutput:
        thought = self._thoughts.text if self._has_thought else None
        return _output(self._answer, thought, self._num_thinking)


class TaggedThinkingState(RecordingState):
    """The marks are text, of any number of tokens. Those that may yet become a mark at the beginning have no
    log-probabilities in the answer."""

    def __init__(
        self,
        profile: ModelProfile,
        sampling: SamplingParams,
        tags: ThinkingTags,
        *,
        is_thinking: bool,
        by_words: bool = True,
    ) -> None:
        super().__init__(profile, sampling)
        self._tags = tags
        self._thoughts = StoppingTextStream(profile.tokenizer, (tags.closes,))
        self._answer = text_stream(profile.tokenizer, sampling.stop, by_words=by_words)
        self._beginning: list[int] | None = None if is_thinking else []  # ids that may become the opening mark
        self._has_thought = is_thinking
        self._num_thinking = 0
        self._unsent = ""  # of the answer: a token may end the thought and begin the answer

    @property
    def _is_thinking(self) -> bool:
        return self._has_thought and not self._thoughts.is_stopped

    def place(self, token: Token) -> TextPlace | None:
        if self._is_thinking:
            return TextPlace("reasoning", self._thoughts.num_characters)
        if self._beginning is not None and self._may_open([*self._beginning, self.profile.id_of(token)]):
            return None
        return TextPlace("text", self._answer.num_characters)

    def num_printed(self, kind: str) -> int:
        return self._answer.num_printed if kind == "text" else self._thoughts.num_printed

    def take(self, token: Token) -> StreamDelta | None:
        token_id = self.profile.id_of(token)
        if self._is_thinking:
            self._num_thinking += 1
            return self._think([token_id])
        if self._beginning is None:
            return self._say([token_id])
        self._beginning.append(token_id)
        if self._may_open(self._beginning):
            return self._open_thought()
        beginning, self._beginning = self._beginning, None
        return self._say(beginning)

    def rest(self) -> StreamDelta | None:
        if self._is_thinking:
            return text_delta(self._thoughts.flush(), "reasoning")
        for token_id in self._beginning or ():
            self._unsent += self._answer.push(token_id)
        return text_delta(self._unsent + self._answer.flush(), ends=self._answer.is_stopped)

    def _may_open(self, ids: Sequence[int]) -> bool:
        """Whether the text of the ids is the opening mark, with or without something behind it, or could become it."""
        text = self.profile.tokenizer.decode(ids).lstrip()
        return text.startswith(self._tags.opens) or self._tags.opens.startswith(text)

    def _open_thought(self) -> StreamDelta | None:
        assert self._beginning is not None
        text = self.profile.tokenizer.decode(self._beginning).lstrip()
        if not text.startswith(self._tags.opens):
            return None
        self._num_thinking, self._beginning, self._has_thought = len(self._beginning), None, True
        return self._think(self._ids_behind(text, self._tags.opens))

    def _think(self, ids: Sequence[int]) -> StreamDelta | None:
        thought = "".join(self._thoughts.push(token_id) for token_id in self._visible(ids, self._thoughts))
        if self._thoughts.is_stopped:
            for token_id in self._ids_behind(self._thoughts.beyond, self._tags.closes):
                self._unsent += self._answer.push(token_id)
        return text_delta(thought, "reasoning")

    def _say(self, ids: Sequence[int]) -> StreamDelta | None:
        visible = self._visible(ids, self._answer) if self._has_thought else ids
        text = self._unsent + "".join(self._answer.push(token_id) for token_id in visible)
        self._unsent = ""
        return text_delta(text, ends=self._answer.is_stopped)

    def _ids_behind(self, text: str, mark: str) -> list[int]:
        return self.profile.tokenizer.encode(text[len(mark) :].lstrip("\n"))

    def _visible(self, ids: Sequence[int], stream: TextStream) -> Sequence[int]:
        """Without line breaks at the beginning of the stream."""
        breaks = 0
        if not stream.num_characters:
            while breaks < len(ids) and not self.profile.tokenizer.token_bytes(ids[breaks]).strip(b"\n"):
                breaks += 1
        return ids[breaks:]

    def output(self) -> SkillOutput:
        thought = self._thoughts.text if self._has_thought else None
        return _output(self._answer, thought, self._num_thinking)


def _output(answer: TextStream, thought: str | None, num_thinking: int) -> SkillOutput:
    fields: dict[str, Any] = {"answer": answer.text}
    if thought is not None:
        fields["reasoning"] = {"text": thought, "grounding": []}
    return SkillOutput(fields, answer.text, num_thinking, stop_text=answer.stop_text)
