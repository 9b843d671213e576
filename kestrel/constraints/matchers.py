"""One format compiled into a matcher over one vocabulary (llguidance), and an answer that follows it."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kestrel.constraints.calls import lark_of
from kestrel.constraints.formats import ResponseFormat
from kestrel.errors import RequestError

FIELD = "response_format"
FOLLOWING_S = 2.0
FOLLOWING_TOKEN_S = 0.001
"""Computing that an answer may take to be followed: so much in all, and so much more for each token of it."""

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
class Compiled:
    matcher: LLMatcher
    first_mask: bytes
    field: str = FIELD


class MatcherConstraint:
    """One answer on its way through a compiled format (a `TokenConstraint`)."""

    def __init__(self, compiled: Compiled) -> None:
        self._matcher = compiled.matcher.deep_copy()
        self._allowed = compiled.first_mask
        self._field = compiled.field
        self._left_s = FOLLOWING_S

    @property
    def allowed(self) -> bytes:
        return self._allowed

    def accept(self, token_id: int) -> None:
        began_s = time.thread_time()
        if self._matcher.consume_token(token_id):
            self._allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(
                self._field, f"became too complex while it was answered ({_reason(self._matcher)}); simplify it"
            )
        self._left_s += FOLLOWING_TOKEN_S - (time.thread_time() - began_s)
        if self._left_s < 0:
            raise RequestError(
                self._field, f"took more than {FOLLOWING_S:g} s of computing while it was answered; simplify it"
            )


def without_control_names(tokenizer_json: str) -> str:
    """The same tokenizer with control tokens that no text can spell.

    Text that a format demands is tokenised by the compiler. Under its own name an end-of-text token would be taken for
    the text of that name, and a schema could end an answer early or bring other control ids into it. Names like markup
    count, marked as special or not: published files do not mark `<think>`, which the compiler takes for special.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"].get("vocab")
    if tokenizer["model"].get("type") != "BPE" or not isinstance(vocabulary, dict):
        raise RequestError(FIELD, "needs a model with a BPE tokenizer; leave it out")
    names: dict[str, str] = {}
    for token in tokenizer["added_tokens"]:
        name = token["content"]
        if token["special"] or name[:1] + name[-1:] in ("<>", "[]"):
            names[name] = token["content"] = f"<|{secrets.token_hex(16)}|>"
            token["special"] = True
    tokenizer["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocabulary.items()}
    return json.dumps(tokenizer)


def read_vocabulary(tokenizer_json: str, eos_id: int) -> LLTokenizer:
    """Holds the interpreter: half a second for 50 000 tokens."""
    return LLTokenizer(tokenizer_json, eos_token=eos_id, slices=LLTokenizer.json_slices())


def compile_format(vocabulary: LLTokenizer, wanted: ResponseFormat) -> Compiled:
    """Raises RequestError when the format is invalid or not supported. Bounds neither its time nor its memory."""
    if wanted.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(wanted.text)
    elif wanted.kind == "calls":
        grammar = LLMatcher.grammar_from_lark(lark_of(wanted, _SPELLING, vocabulary.is_special_token))
    else:
        try:
            grammar = LLMatcher.grammar_from_json_schema(wanted.text, overrides=_SPELLING)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise RequestError(wanted.field, f"is not a JSON schema ({error}); correct it") from None
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    # One step ahead: a format without an end, such as a reference to itself, shows here and not in the batch.
    for one in (matcher, *_after_first_token(matcher, first_mask)):
        if one.is_error():
            raise RequestError(wanted.field, f"cannot be answered ({_reason(one)}); simplify or correct it")
    return Compiled(matcher, first_mask, wanted.field)


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
