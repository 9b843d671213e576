"""Answers that may call tools: what another state says is looked through for calls.

Stop strings end text and not calls, and log-probabilities are those of all tokens of the answer, calls included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.skills.base import SkillState, Tokenizer
from kestrel.skills.states import first_stop, open_stop, stop_before
from kestrel.skills.tool_parsers import Found, ToolParser
from kestrel.tokens import Token


class ToolState(SkillState):
    """Result: as of the inner state, with `tool_calls`; in streams, pieces of them come as the data of a chunk."""

    def __init__(self, inner: SkillState, parser: ToolParser, stops: Sequence[str], *, is_parallel: bool) -> None:
        self._inner = inner
        self._parser = parser
        self._stops = stops
        self._is_parallel = is_parallel
        self._held = ""  # text that may become a stop string
        self._is_stopped = False
        self._logprobs: tuple[Mapping[str, Any], ...] = ()  # of tokens that nothing was sent of yet

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        delta = self._inner.consume(token, logprobs)
        if delta is None or delta.kind != "text":
            return delta
        return self._sent(self._parser.push(delta.text), delta)

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._inner.consume_end(token_id, logprobs)

    def flush(self) -> StreamDelta | None:
        delta = self._inner.flush()
        if delta is not None and delta.kind != "text":
            return delta
        delta = delta or StreamDelta()
        return self._sent(self._parser.push(delta.text, is_end=True), delta, is_end=True)

    def _sent(self, found: Found, delta: StreamDelta, *, is_end: bool = False) -> StreamDelta | None:
        self._logprobs += delta.logprobs
        text = self._up_to_a_stop(found.text, is_end)
        ends = self._is_stopped or (not (self._is_parallel or is_end) and self._parser.num_done > 0)
        if not (text or found.calls or ends or (is_end and self._logprobs)):
            return None
        sent = replace(delta, text=text, logprobs=self._logprobs, ends=ends)
        self._logprobs = ()
        return replace(sent, kind="tool_calls", data={"tool_calls": found.calls}) if found.calls else sent

    def _up_to_a_stop(self, text: str, is_end: bool) -> str:
        if self._is_stopped:
            return ""
        self._held += text
        found, open_from = first_stop(self._held, self._stops), open_stop(self._held, self._stops)
        open_from = len(self._held) if is_end else open_from
        self._is_stopped = found is not None and found <= open_from
        end = found if self._is_stopped else open_from
        said, self._held = self._held[:end], self._held[end:]
        return said

    def finish(self, reason: FinishReason) -> SkillOutput:
        output = self._inner.finish(reason)
        text, calls = self._parser.result(keeps_unfinished=reason is FinishReason.LENGTH)
        stop_text = None
        if self._is_stopped:
            end = first_stop(text, self._stops)
            text, stop_text = text[:end], stop_before(text[end:], self._stops)
        fields = {**output.fields, "answer": text, "tool_calls": [call.body() for call in calls]}
        return replace(output, fields=fields, text=text, stop_text=stop_text)


class NamingTokenizer:
    """A `Tokenizer` in whose texts some control tokens stand by their names."""

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._names = {token_id: name for name, token_id in ids.items()}
        self.encode, self.token_name = tokenizer.encode, tokenizer.token_name

    def decode(self, ids: Sequence[int]) -> str:
        text, begin = "", 0
        for at, token_id in enumerate(ids):
            if token_id in self._names:
                text += self._tokenizer.decode(ids[begin:at]) + self._names[token_id]
                begin = at + 1
        return text + self._tokenizer.decode(ids[begin:])

    def token_bytes(self, token_id: int) -> bytes:
        name = self._names.get(token_id)
        return self._tokenizer.token_bytes(token_id) if name is None else name.encode()
