"""Log-probabilities as results and streams show them: one entry per generated token.

{"id", "token", "bytes", "logprob", "kind", "offset", "top"}
- `token` and `bytes`: the token's text, and its bytes as numbers (a token may hold part of a character; a special id
  has neither);
- `logprob`: of the chosen token, None where none was computed;
- `kind`: the kind of stream piece its text is in ("text", "reasoning"), None for an id that is no text;
- `offset`: where in that text it begins, in characters, None for an id that is no text;
- `top`: the most likely ids, best first, as {"id", "token", "bytes", "logprob"}; the chosen one comes last when it is
  not among them.
Tokens whose text was cut away by a stop string have no entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from kestrel.request import PromptReport, TokenLogprobs
from kestrel.skills.base import ModelProfile, Tokenizer


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where the text of a token begins."""

    kind: str
    offset: int


class ShownTokens:
    """Tokens as entries show them; each id is decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: dict[int, dict[str, Any]] = {}

    def entry(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        chosen = None if logprobs is None else logprobs.chosen
        top = () if logprobs is None else logprobs.top
        if chosen is not None and token_id not in (top_id for top_id, _ in top):
            top = (*top, (token_id, chosen))
        return {**self._show(token_id, chosen), "top": [self._show(*likely) for likely in top]}

    def _show(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        shown = self._shown.get(token_id)
        if shown is None:
            token, octets = self._tokenizer.decode([token_id]), self._tokenizer.token_bytes(token_id)
            shown = self._shown[token_id] = {"id": token_id, "token": token, "bytes": list(octets)}
        return {**shown, "logprob": logprob}


class LogprobLedger:
    """The entries of one request, and how far the stream has shown them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = ShownTokens(tokenizer)
        self._num_streamed = 0
        self.entries: list[dict[str, Any]] = []

    def add(self, token_id: int, logprobs: TokenLogprobs | None, place: TextPlace | None) -> None:
        entry = self._tokens.entry(token_id, logprobs)
        entry["kind"] = None if place is None else place.kind
        entry["offset"] = None if place is None else place.offset
        self.entries.append(entry)

    def stream_up_to(self, kind: str, end: int) -> tuple[dict[str, Any], ...]:
        """Entries not streamed yet whose text of this kind lies before `end`; earlier ones of no text are skipped."""
        streamed: list[dict[str, Any]] = []
        for entry in self.entries[self._num_streamed :]:
            if entry["kind"] == kind:
                if not _is_before(entry, end):
                    break
                streamed.append(entry)
            self._num_streamed += 1
        return tuple(streamed)

    def stream_rest(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The kind of the last text, and its entries that were not streamed yet."""
        kinds = [entry["kind"] for entry in self.entries[self._num_streamed :] if entry["kind"] is not None]
        kind = kinds[-1] if kinds else "text"
        rest = tuple(entry for entry in self.entries[self._num_streamed :] if entry["kind"] == kind)
        self._num_streamed = len(self.entries)
        return kind, rest

    def cut(self, kind: str, end: int) -> None:
        """Drop what lies behind the end of a text."""
        self.entries = [e for e in self.entries if e["kind"] != kind or _is_before(e, end)]


def _is_before(entry: dict[str, Any], end: int) -> bool:
    """Whether an entry's text begins before `end`, or is nothing and stands right there."""
    return entry["offset"] < end or (entry["offset"] == end and not entry["bytes"])


def prompt_logprobs(ids: Sequence[int], report: PromptReport, profile: ModelProfile) -> Iterator[dict[str, Any] | None]:
    """What the model said about a prompt: one entry per id, made as they are asked for. Nothing comes before the first,
    so its entry is None."""
    tokens = ShownTokens(profile.tokenizer)
    unscored = len(ids) - report.num_scores
    yield from repeat(None, unscored)
    for i, score in zip(ids[unscored:], chain.from_iterable(report.stretches), strict=True):
        yield {**tokens.entry(i, TokenLogprobs(score.logprob, score.top)), "rank": score.rank}
