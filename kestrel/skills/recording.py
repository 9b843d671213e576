"""What the states of all built-in skills share: the emitted ids and, when asked for, their log-probabilities."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from kestrel.request import FinishReason, SamplingParams, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.skills.base import ModelProfile, SkillState, SpecialIds, Tokenizer
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
        self._logprobs: list[TokenLogprobs | None] | None = None if sampling.logprobs is None else []

    @abstractmethod
    def take(self, token: Token) -> StreamDelta | None:
        """Take one token; return what it adds to a stream, if anything."""

    @abstractmethod
    def output(self) -> SkillOutput:
        """The result of all tokens so far."""

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        self.token_ids.append(token_id(self.profile.ids, token))
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        return self.take(token)

    def finish(self, reason: FinishReason) -> SkillOutput:
        output = self.output()
        if self._logprobs is not None:
            texts = TokenTexts(self.profile.tokenizer)
            pairs = zip(self.token_ids, self._logprobs, strict=True)
            output.fields["logprobs"] = [logprob_entry(i, logprobs, texts) for i, logprobs in pairs]
        return output


class TokenTexts(dict[int, str]):
    """Text of single ids, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode([token_id])
        return text


def logprob_entry(chosen: int, logprobs: TokenLogprobs | None, texts: TokenTexts) -> dict[str, Any]:
    top = () if logprobs is None else logprobs.top
    return {
        "id": chosen,
        "token": texts[chosen],
        "logprob": None if logprobs is None else logprobs.chosen,
        "top": [{"id": i, "token": texts[i], "logprob": logprob} for i, logprob in top],
    }
