"""The state of skills whose result is plain text."""

from __future__ import annotations

from kestrel.request import SamplingParams, SkillOutput, StreamDelta
from kestrel.skills.base import ModelProfile
from kestrel.skills.recording import RecordingState, token_id
from kestrel.skills.text_stream import TextStream
from kestrel.tokens import Token


class TextState(RecordingState):
    """Streams text and returns it under `field`."""

    def __init__(self, profile: ModelProfile, sampling: SamplingParams, field: str) -> None:
        super().__init__(profile, sampling)
        self._field = field
        self._stream = TextStream(profile.tokenizer)

    def take(self, token: Token) -> StreamDelta | None:
        return text_delta(self._stream.push(token_id(self.profile.ids, token)))

    def flush(self) -> StreamDelta | None:
        return text_delta(self._stream.flush())

    def output(self) -> SkillOutput:
        return SkillOutput({self._field: self._stream.text}, self._stream.text)


def text_delta(text: str, kind: str = "text") -> StreamDelta | None:
    return StreamDelta(text, kind) if text else None
