"""Checks of single request fields: raw value in, typed value out, or a RequestError that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_STOPS

Check = Callable[[str, Any], Any]
"""Takes a field's name and raw value; returns the typed value or raises RequestError."""


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
        return value

    return check


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        if not is_number(value) or not low <= value <= high:
            raise RequestError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")
        return float(value)

    return check


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(name, f"must be true or false (got {shown(value)})")
    return value


def any_text(name: str, value: Any) -> str:
    """Text that can be encoded, possibly empty."""
    if not isinstance(value, str):
        raise RequestError(name, f"must be text (got {shown(value)})")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(name, "holds half of a surrogate pair; send well-formed Unicode text") from None
    return value


def text(name: str, value: Any) -> str:
    """Text with at least one visible character, kept as given."""
    if not any_text(name, value).strip():
        raise RequestError(name, "is empty; give some text")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(name, f"must be a list of token ids (got {shown(value)})")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise RequestError(name, f"must hold token ids only; entry {index} is {shown(token_id)}")
    return tuple(value)


def some_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = token_ids(name, value)
    if not ids:
        raise RequestError(name, "is an empty list; name at least one token id or leave it out")
    return ids


def stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(name, f"has {len(value)} ids; give at most {MAX_STOP_TOKEN_IDS}")
    return token_ids(name, value)


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """One text or a few, kept as given, blanks and all."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        raise RequestError(name, f"must be a text or a list of texts (got {shown(value)})")
    if len(texts) > MAX_STOPS:
        raise RequestError(name, f"has {len(texts)} texts; give at most {MAX_STOPS}")
    for one in texts:
        if not 0 < len(any_text(name, one)) <= MAX_STOP_CHARACTERS:
            raise RequestError(name, f"must be texts of 1 to {MAX_STOP_CHARACTERS} characters (got {shown(one)})")
    return tuple(texts)


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping from ids, also as strings of digits, to numbers; sorted by id."""
    if not isinstance(value, Mapping):
        raise RequestError(name, f"must map token ids to numbers from -100 to 100 (got {shown(value)})")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(name, f"has {len(value)} entries; give at most {MAX_LOGIT_BIAS}")
    bias: dict[int, float] = {}
    for key, number_given in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        (token_id,) = token_ids(name, [int(key) if is_digits else key])
        if token_id in bias:
            raise RequestError(name, f"names id {token_id} twice; give each id once")
        if not is_number(number_given) or not -100.0 <= number_given <= 100.0:
            raise RequestError(name, f"must map id {token_id} to a number from -100 to 100 (got {shown(number_given)})")
        bias[token_id] = float(number_given)
    return tuple(sorted(bias.items()))
