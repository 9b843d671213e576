"""What each parameter of a generation means here: a setting of the engine, a matter of the server, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kestrel.errors import RequestError, shown
from kestrel.server.schemas import RESPONSE_FORMAT
from kestrel.settings import MAX_SEED, ROUTING, SETTINGS, Kind, Schema, Setting, boolean, integer

CHOICES = integer(1, 128)
"""Answers one request may ask for (`n`)."""

Body: TypeAlias = Mapping[str, Any]

PARAMETERS: Mapping[str, Setting] = {
    name: setting for setting in (*SETTINGS.values(), *ROUTING.values()) for name in setting.openai_names
}
"""The settings that the dialect offers, by its own names for them."""


@dataclass(frozen=True)
class Refusal:
    """A parameter of the dialect that has no meaning here; the harmless values of it may be sent."""

    remedy: str
    harmless: tuple[Any, ...] = ()


@dataclass
class EngineFields:
    """Fields for the engine, and what the client called each of them."""

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, setting: str, name: str, value: Any) -> None:
        if setting in self.values and self.values[setting] != value:
            raise RequestError(name, f"differs from {self.names[setting]}, which means the same; give one of them")
        self.values[setting] = value
        self.names[setting] = name


def parameter_schemas(max_tokens: Kind = SETTINGS["max_tokens"].kind) -> dict[str, Schema]:
    """What a route takes for `max_tokens` is its own."""
    schemas = {name: setting.schema for name, setting in PARAMETERS.items()}
    for name in SETTINGS["max_tokens"].openai_names:
        schemas[name] |= max_tokens.schema
    return {**schemas, "response_format": RESPONSE_FORMAT}


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one of several choices; the first has the seed itself, so that it says what it says alone."""
    return (seed + choice * 0x9E3779B97F4A7C15) % (MAX_SEED + 1)


REFUSED_IN_CHAT: Mapping[str, Refusal] = {
    "functions": Refusal("it has made way for tools; use these", ([],)),
    "function_call": Refusal("it has made way for tool_choice; use that", ("none", "auto")),
    "modalities": Refusal('answers are text; leave it out or send ["text"]', (["text"],)),
    "audio": Refusal("answers are text; leave it out"),
    "web_search_options": Refusal("nothing is looked up; leave it out"),
}
REFUSED_IN_COMPLETIONS: Mapping[str, Refusal] = {
    "suffix": Refusal("text is continued, not filled in; leave it out", ("",)),
}


# ---------------------------------------------------------------------- reading a body


def given(body: Body) -> dict[str, Any]:
    """The body without nulls: null means not given, everywhere."""
    return {name: value for name, value in body.items() if value is not None}


def refuse(body: Body, refusals: Mapping[str, Refusal]) -> None:
    for name, refusal in refusals.items():
        if name in body and body[name] not in refusal.harmless:
            raise RequestError(name, f"is not supported: {refusal.remedy}")


def take_settings(body: Body) -> EngineFields:
    fields = EngineFields()
    for name, setting in PARAMETERS.items():
        if name in body:
            fields.add(setting.name, name, body[name])
    if "response_format" in body:
        fields.add("response_format", "response_format", body["response_format"])
    return fields


def take_choices(body: Body) -> int:
    return CHOICES("n", body.get("n", 1))


@dataclass(frozen=True)
class StreamOptions:
    """Whether to stream, and which usage to send on the way."""

    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


def take_stream(body: Body) -> StreamOptions:
    stream = boolean("stream", body.get("stream", False))
    options = body.get("stream_options")
    if options is None:
        return StreamOptions(stream)
    if not stream:
        raise RequestError("stream_options", "is only for streams; set stream to true or leave it out")
    if not isinstance(options, Mapping):
        raise RequestError(
            "stream_options", f'must be an object such as {{"include_usage": true}} (got {shown(options)})'
        )
    flags = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        flags.append(value is not None and boolean(f"stream_options.{name}", value))
    return StreamOptions(stream, include_usage=flags[0], continuous_usage=flags[1])
