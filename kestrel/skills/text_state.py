"""The state of skills whose result is plain text."""

from __future__ import annotations

from kestrel.request import SkillOutput, StreamDelta
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile
from kestrel.skills.logprobs import TextPlace
from kestrel.skills.recording import RecordingState, token_id
from kestrel.skills.stop_strings import text_stream
from kestrel.tokens import Token


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
        chunk = self._stream.push(token_id(self.profile.ids, token))
        return text_delta(chunk, ends=self._stream.is_stopped)

    def rest(self) -> StreamDelta | None:
        return text_delta(self._stream.flush(), ends=self._stream.is_stopped)

    def output(self) -> SkillOutput:
        return SkillOutput({self._field: self._stream.text}, self._stream.text)


def text_delta(text: str, kind: str = "text", *, ends: bool = False) -> StreamDelta | None:
    return StreamDelta(text, kind, ends=ends) if text or ends else None
