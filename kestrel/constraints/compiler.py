"""Response formats compiled into matchers over one tokenizer's vocabulary (llguidance), the recent ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kestrel.constraints.formats import ResponseFormat
from kestrel.constraints.vocabulary import without_control_names
from kestrel.errors import RequestError

FIELD = "response_format"
CAPACITY = 64
"""Compiled formats kept; each holds up to some ten megabytes when its expressions are intricate."""

# Blanks as Python's json module writes them: a model left to choose can write blanks for ever, and a stream that breaks
# at blanks keeps moving.
_SPELLING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


def _limits() -> LLParserLimits:
    """Far above what ordinary schemas need; a hostile one is stopped after milliseconds a token, and megabytes."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher
    first_mask: bytes


class MatcherConstraint:
    """One answer on its way through a compiled format (a `TokenConstraint`)."""

    def __init__(self, matcher: LLMatcher, first_mask: bytes) -> None:
        self._matcher = matcher
        self._allowed = first_mask

    @property
    def allowed(self) -> bytes:
        return self._allowed

    def accept(self, token_id: int) -> None:
        if self._matcher.consume_token(token_id):
            self._allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(
                FIELD, f"became too intricate while it was answered ({_reason(self._matcher)}); simplify it"
            )


class ConstraintCompiler:
    """For one tokenizer. Any thread may call it; compiling can take long and holds up nobody who finds theirs kept."""

    def __init__(self, tokenizer_json: Callable[[], str], eos_id: int, capacity: int = CAPACITY) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_id = eos_id
        self._capacity = capacity
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[ResponseFormat, _Compiled] = OrderedDict()

    def __reduce__(self) -> tuple[type[ConstraintCompiler], tuple[Callable[[], str], int, int]]:
        return type(self), (self._tokenizer_json, self._eos_id, self._capacity)  # a copy keeps formats of its own

    @property
    def num_kept(self) -> int:
        return len(self._compiled)

    def is_kept(self, wanted: ResponseFormat) -> bool:
        with self._lock:
            return wanted in self._compiled

    def start(self, wanted: ResponseFormat) -> MatcherConstraint:
        """A constraint for one answer. Raises RequestError when the format is invalid or not supported."""
        with self._lock:
            compiled = self._compiled.get(wanted)
        if compiled is None:
            compiled = self._compile(wanted)
        with self._lock:
            self._compiled[wanted] = compiled
            self._compiled.move_to_end(wanted)
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
            return MatcherConstraint(compiled.matcher.deep_copy(), compiled.first_mask)

    def _compile(self, wanted: ResponseFormat) -> _Compiled:
        if wanted.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(wanted.text)
        else:
            try:
                grammar = LLMatcher.grammar_from_json_schema(wanted.text, overrides=_SPELLING)  # pyright: ignore[reportArgumentType]
            except ValueError as error:
                raise RequestError(FIELD, f"is no JSON schema ({error}); correct it") from None
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=_limits())
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        # One step ahead: a format without an end, such as a reference to itself, shows here and not in the batch.
        for one in (matcher, *_after_first_token(matcher, first_mask)):
            if one.is_error():
                raise RequestError(FIELD, f"cannot be answered ({_reason(one)}); simplify or correct it")
        return _Compiled(matcher, first_mask)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                vocabulary = without_control_names(self._tokenizer_json())
                self._tokenizer = LLTokenizer(vocabulary, eos_token=self._eos_id, slices=LLTokenizer.json_slices())
            return self._tokenizer


def _after_first_token(matcher: LLMatcher, mask: bytes) -> list[LLMatcher]:
    first = next((8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1), None)
    if first is None:
        return []
    ahead = matcher.deep_copy()
    ahead.consume_token(first)
    return [ahead]


def _reason(matcher: LLMatcher) -> str:
    """What the library says, without its notes in tags and on one short line."""
    said = matcher.get_error().split("\n<", 1)[0]
    return " ".join(said.split())[:200]
