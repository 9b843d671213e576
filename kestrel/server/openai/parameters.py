"""What each parameter of a generation means here: a setting of the engine, a matter of the server, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kestrel.errors import RequestError, shown
from kestrel.sampling_params import MAX_LOGPROBS, MAX_SEED
from kestrel.server.schemas import COMMON_FIELDS, RESPONSE_FORMAT, SETTINGS, Schema, integer
from kestrel.skills.fields import MAX_TOKENS

MAX_CHOICES = 128
"""Answers one request may ask for (`n`)."""
MAX_SEEDS = MAX_SEED + 1

Body: TypeAlias = Mapping[str, Any]


def _as_given(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Parameter:
    """`schema` is for the API description; the skill that takes the setting is who refuses a value."""

    name: str
    schema: Schema
    setting: str
    """The engine's name for it."""
    convert: Callable[[Any], Any] = _as_given
    """From the value of this dialect to the engine's, where they differ."""


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


# ---------------------------------------------------------------------- values that differ from the engine's


def _top_k(value: Any) -> Any:
    """-1 keeps all, as 0 does."""
    return 0 if value == -1 and not isinstance(value, bool) else value


def _seed(value: Any) -> Any:
    """Every integer of 64 bits names a seed; the engine's are not negative."""
    is_negative = isinstance(value, int) and not isinstance(value, bool) and -MAX_SEEDS <= value < 0
    return value + MAX_SEEDS if is_negative else value


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one of several choices; the first has the seed itself, so that it says what it says alone."""
    return (seed + choice * 0x9E3779B97F4A7C15) % MAX_SEEDS


BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}


def _as_in_native(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, SETTINGS[name], name) for name in names)


SAMPLING = (
    *_as_in_native("temperature", "top_p"),
    Parameter("top_k", integer(-1, MAX_TOKENS), "top_k", _top_k),
    *_as_in_native("min_p"),
    Parameter("seed", integer(-MAX_SEEDS, MAX_SEED), "seed", _seed),
    *_as_in_native("stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *_as_in_native("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    Parameter("response_format", RESPONSE_FORMAT, "response_format"),
    Parameter("priority", COMMON_FIELDS["priority"], "priority"),
)


def token_bounds(least: int) -> tuple[Parameter, Parameter]:
    """The two names of `max_tokens`."""
    bound = integer(least, MAX_TOKENS)
    return Parameter("max_tokens", bound, "max_tokens"), Parameter("max_completion_tokens", bound, "max_tokens")


TOP_LOGPROBS = integer(0, MAX_LOGPROBS)
"""How many likely tokens may be asked for beside each."""

NOT_TRAINED = "the model was not trained to call tools; leave it out"
REFUSED_IN_CHAT: Mapping[str, Refusal] = {
    "tools": Refusal(NOT_TRAINED, ([],)),
    "tool_choice": Refusal(NOT_TRAINED, ("none", "auto")),
    "functions": Refusal(NOT_TRAINED, ([],)),
    "function_call": Refusal(NOT_TRAINED, ("none", "auto")),
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


def take_settings(body: Body, parameters: Sequence[Parameter], fields: EngineFields) -> None:
    for parameter in parameters:
        if parameter.name in body:
            value = parameter.convert(body[parameter.name])
            fields.add(parameter.setting, parameter.name, value)


def take_flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(name, f"must be true or false (got {shown(value)})")
    return value


def take_integer(body: Body, name: str, schema: Schema, default: int) -> int:
    value = body.get(name, default)
    low, high = schema["minimum"], schema["maximum"]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
    return value


def take_choices(body: Body) -> int:
    return take_integer(body, "n", integer(1, MAX_CHOICES), 1)


@dataclass(frozen=True)
class StreamOptions:
    """Whether to stream, and which usage to send on the way."""

    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


def take_stream(body: Body) -> StreamOptions:
    stream = take_flag(body, "stream")
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
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"stream_options.{name}", f"must be true or false (got {shown(value)})")
        flags.append(bool(value))
    return StreamOptions(stream, include_usage=flags[0], continuous_usage=flags[1])
