"""Typed values from raw request fields: checks of single values, the settings, and tables of what a skill accepts.

Every built-in skill reads its request with a `FieldTable`: its own fields, plus `image`, `settings` and each setting by
its own name. A setting may stand in `settings` or beside it; None means "not given" everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.sampling_params import (
    BOUNDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    SamplingParams,
    require_within,
)

Check = Callable[[str, Any], Any]
"""Takes a field's name and raw value; returns the typed value or raises RequestError."""


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        require_within(name, value, low, high)
        return value

    return check


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def bounded(setting: str) -> Check:
    """Within the bounds of a sampling setting."""
    low, high = BOUNDS[setting]

    def check(name: str, value: Any) -> float:
        require_within(name, value, low, high)
        return value if isinstance(low, int) else float(value)

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


# ---------------------------------------------------------------------- settings and tables

MAX_OBJECTS = 10_000

DrawSeed = Callable[[], int]


def random_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Setting:
    check: Check
    other_names: tuple[str, ...] = ()


SETTINGS: Mapping[str, Setting] = {
    "max_tokens": Setting(integer(1, MAX_TOKENS), ("max_new_tokens",)),
    "max_objects": Setting(integer(1, MAX_OBJECTS)),
    "temperature": Setting(bounded("temperature")),
    "top_p": Setting(bounded("top_p")),
    "top_k": Setting(bounded("top_k")),
    "min_p": Setting(bounded("min_p")),
    "seed": Setting(bounded("seed")),
    "logprobs": Setting(bounded("logprobs")),
    "adapter": Setting(text, ("variant",)),
    "allowed_ids": Setting(some_token_ids),
    "suppressed_ids": Setting(token_ids),
    "presence_penalty": Setting(bounded("presence_penalty")),
    "frequency_penalty": Setting(bounded("frequency_penalty")),
    "repetition_penalty": Setting(bounded("repetition_penalty")),
    "logit_bias": Setting(logit_bias),
    "min_tokens": Setting(bounded("min_tokens")),
    "ignore_eos": Setting(boolean),
    "stop_token_ids": Setting(stop_token_ids),
    "stop": Setting(stop_strings),
}

TEXT_SETTINGS = frozenset(
    [
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "stop",
    ]
)
"""Settings of answers in words; points, boxes and outlines have a form of their own that these would break."""

_NOT_SAMPLING = frozenset(["max_tokens", "max_objects", "adapter"])
"""Settings that SamplingParams has no field of the same name for."""

# A skill is bounded by tokens or by objects; the other bound is refused rather than ignored.
_OTHER_BOUND = {"max_tokens": "max_objects", "max_objects": "max_tokens"}


@dataclass(frozen=True, slots=True)
class Values:
    """The checked values of one request; what was not given is absent."""

    own: Mapping[str, Any]
    settings: Mapping[str, Any]
    image: Any = None

    def required(self, name: str, what: str) -> Any:
        if name not in self.own:
            raise RequestError(name, f"is required: give {what}")
        return self.own[name]

    @property
    def images(self) -> tuple[Any, ...]:
        return () if self.image is None else (self.image,)

    @property
    def adapter(self) -> str | None:
        return self.settings.get("adapter")

    def sampling(
        self, *, temperature: float, top_p: float, max_new_tokens: int, draw_seed: DrawSeed = random_seed
    ) -> SamplingParams:
        """How to sample; the arguments are the skill's defaults. A seed is drawn when chance plays a part."""
        given = {"temperature": temperature, "top_p": top_p, **self.settings}
        if "seed" not in given:
            given["seed"] = draw_seed() if given["temperature"] > 0.0 else 0
        max_new_tokens = given.get("max_tokens", max_new_tokens)
        params = {name: value for name, value in given.items() if name not in _NOT_SAMPLING}
        return SamplingParams(max_new_tokens=max_new_tokens, **params)


@dataclass(frozen=True, slots=True)
class FieldTable:
    """What one skill accepts."""

    skill: str
    own: Mapping[str, Check]
    bound: str = "max_tokens"
    """Which of max_tokens and max_objects limits the skill."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Names of this skill only for common settings, such as max_points for max_objects."""
    refused: frozenset[str] = frozenset()
    """Settings that make no sense for this skill."""
    setting_checks: Mapping[str, Check] = field(default_factory=dict)
    """Settings by canonical name that this skill checks in its own way."""

    def read(self, raw: Mapping[str, Any]) -> Values:
        """Checked values of a request. Raises RequestError naming the first bad or unknown field."""
        own: dict[str, Any] = {}
        settings = _Settings(self)
        image = None
        for name, value in raw.items():
            if name in self.own:
                if value is not None:
                    own[name] = self.own[name](name, value)
            elif name == "image":
                image = value
            elif name == "settings":
                settings.add_all(value)
            elif not settings.try_add(name, name, value):
                known = sorted([*self.own, "image", "settings", *self.setting_names()])
                close = did_you_mean(name, known)
                raise RequestError(
                    str(name), f"is not a field of {self.skill}; known fields: {', '.join(known)}{close}"
                )
        return Values(own, settings.values, image)

    def setting_names(self) -> Iterator[str]:
        """Every name this skill knows for a setting that it takes."""
        for name, setting in SETTINGS.items():
            if name != _OTHER_BOUND[self.bound] and name not in self.refused:
                yield from (name, *setting.other_names)
        yield from self.other_names

    def canonical_setting(self, name: str) -> str | None:
        if name in self.other_names:
            return self.other_names[name]
        for canonical, setting in SETTINGS.items():
            if name == canonical or name in setting.other_names:
                return canonical
        return None


class _Settings:
    """Collects settings from both places and refuses contradictions."""

    def __init__(self, table: FieldTable) -> None:
        self._table = table
        self._given_as: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def add_all(self, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise RequestError("settings", f"must map setting names to values (got {shown(given)})")
        for name, value in given.items():
            if not self.try_add(name, f"settings.{name}", value):
                known = sorted(self._table.setting_names())
                close = did_you_mean(name, known)
                raise RequestError(f"settings.{name}", f"is not a setting; known settings: {', '.join(known)}{close}")

    def try_add(self, name: str, given_as: str, value: Any) -> bool:
        """Take one setting; False when the name is none. `given_as` says where it stood."""
        canonical = self._table.canonical_setting(name)
        if canonical is None:
            return False
        if value is None:
            return True
        bound = self._table.bound
        if canonical == _OTHER_BOUND[bound]:
            raise RequestError(name, f"does not limit {self._table.skill}; use {bound}")
        if canonical in self._table.refused:
            raise RequestError(name, f"is for answers in words and does not apply to {self._table.skill}; leave it out")
        checked = self._table.setting_checks.get(canonical, SETTINGS[canonical].check)(name, value)
        if canonical in self.values and self.values[canonical] != checked:
            first = self._given_as[canonical]
            values = f"{first}={shown(self.values[canonical])} and {given_as}={shown(checked)}"
            raise RequestError(name, f"is given twice with different values ({values}); give it once")
        self.values[canonical] = checked
        self._given_as[canonical] = given_as
        return True
