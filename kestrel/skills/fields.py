"""Tables of what a skill accepts, and the typed values of one request.

Every built-in skill reads its request with a `FieldTable`: its own fields, plus `image`, `settings` and each setting of
`kestrel.settings` by its own name. A setting may stand in `settings` or beside it; None means "not given" everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.settings import CANONICAL_NAMES, OTHER_BOUND, SETTINGS, Check, SamplingParams

DrawSeed = Callable[[], int]


def random_seed() -> int:
    return secrets.randbits(63)


TEXT_SETTINGS = frozenset(setting.name for setting in SETTINGS.values() if setting.in_words)
_SAMPLING = frozenset(one.name for one in fields(SamplingParams))


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

    @property
    def max_crops(self) -> int | None:
        return self.settings.get("max_crops")

    def sampling(
        self,
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        draw_seed: DrawSeed = random_seed,
        **others: float,
    ) -> SamplingParams:
        """How to sample; the arguments are the skill's defaults, `others` those of further settings by their names. A
        seed is drawn when chance plays a part."""
        given = {"temperature": temperature, "top_p": top_p, **others, **self.settings}
        if "seed" not in given:
            given["seed"] = draw_seed() if given["temperature"] > 0.0 else 0
        max_new_tokens = given.get("max_tokens", max_new_tokens)
        params = {name: value for name, value in given.items() if name in _SAMPLING}
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
            if name != OTHER_BOUND[self.bound] and name not in self.refused:
                yield from setting.names
        yield from self.other_names

    def canonical_setting(self, name: str) -> str | None:
        return self.other_names.get(name) or CANONICAL_NAMES.get(name)


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
        checked = self._table.setting_checks.get(canonical, SETTINGS[canonical].kind)(name, value)
        if canonical in self.values and self.values[canonical] != checked:
            first = self._given_as[canonical]
            values = f"{first}={shown(self.values[canonical])} and {given_as}={shown(checked)}"
            raise RequestError(name, f"is given twice with different values ({values}); give it once")
        self.values[canonical] = checked
        self._given_as[canonical] = given_as
        return True
