"""Typed values from raw request fields, by table.

Every built-in skill reads its request with a `FieldTable`: its own fields, plus `image`, `settings` and each setting by
its own name. A setting may stand in `settings` or beside it; None means "not given" everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_TEMPERATURE, MIN_REPETITION_PENALTY, SamplingParams
from kestrel.skills.checks import (
    Check,
    boolean,
    integer,
    logit_bias,
    number,
    some_token_ids,
    stop_strings,
    stop_token_ids,
    text,
    token_ids,
)

MAX_OBJECTS = 10_000
MAX_TOKENS = 2**31 - 1

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
    "temperature": Setting(number(0.0, MAX_TEMPERATURE)),
    "top_p": Setting(number(0.0, 1.0)),
    "top_k": Setting(integer(0, MAX_TOKENS)),
    "min_p": Setting(number(0.0, 1.0)),
    "seed": Setting(integer(0, MAX_SEED)),
    "logprobs": Setting(integer(0, MAX_LOGPROBS)),
    "adapter": Setting(text, ("variant",)),
    "allowed_ids": Setting(some_token_ids),
    "suppressed_ids": Setting(token_ids),
    "presence_penalty": Setting(number(-2.0, 2.0)),
    "frequency_penalty": Setting(number(-2.0, 2.0)),
    "repetition_penalty": Setting(number(MIN_REPETITION_PENALTY, 2.0)),
    "logit_bias": Setting(logit_bias),
    "min_tokens": Setting(integer(0, MAX_TOKENS)),
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

# A skill is bounded by tokens or by objects; the other bound is refused rather than ignored.
OTHER_BOUND = {"max_tokens": "max_objects", "max_objects": "max_tokens"}


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
        given = self.settings
        temperature = given.get("temperature", temperature)
        seed = given["seed"] if "seed" in given else draw_seed() if temperature > 0.0 else 0
        return SamplingParams(
            max_new_tokens=given.get("max_tokens", max_new_tokens),
            temperature=temperature,
            top_p=given.get("top_p", top_p),
            top_k=given.get("top_k", 0),
            min_p=given.get("min_p", 0.0),
            seed=seed,
            logprobs=given.get("logprobs"),
            allowed_ids=given.get("allowed_ids", ()),
            suppressed_ids=given.get("suppressed_ids", ()),
            presence_penalty=given.get("presence_penalty", 0.0),
            frequency_penalty=given.get("frequency_penalty", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
            logit_bias=given.get("logit_bias", ()),
            min_tokens=given.get("min_tokens", 0),
            ignore_eos=given.get("ignore_eos", False),
            stop_token_ids=given.get("stop_token_ids", ()),
            stop=given.get("stop", ()),
        )


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
            if name != OTHER_BOUND[self.bound] and name not in self.refused:
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
        if canonical == OTHER_BOUND[bound]:
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
