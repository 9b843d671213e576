"""What the states of all built-in skills share: the emitted ids and, when asked for, their log-probabilities."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile, SkillState, SpecialIds
from kestrel.skills.logprobs import LogprobLedger, TextPlace
from kestrel.tokens import CoordToken, SizeToken, Token


def token_id(ids: SpecialIds, token: Token) -> int:
    if isinstance(token, CoordToken):
        return ids.coord
    if isinstance(token, SizeToken):
        return ids.size
    return token.id


def compact_json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


class RecordingState(SkillState):
    """Notes every token, then leaves it to `take`. `output` makes the result without log-probabilities."""

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
        emitted = token_id(self.profile.ids, token)
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
