"""The settings of a request, each declared once: what it may be, what it means, who offers it under which name.

The checks, the schemas of both HTTP APIs, the flags of the command line and the table in docs/api.md are made from
`SETTINGS` and `ROUTING`. The same values are taken everywhere, and mean the same. `SamplingParams` has the checked
values, as the runtime reads them. No tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import countOf
from typing import Any, TypeAlias

from kestrel.errors import RequestError, shown


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end. `SETTINGS` has the meaning and the bounds of each field.

    Order: penalties → bias → suppress → temperature → softmax → top-k → top-p → min-p → draw.
    """

    max_new_tokens: int = 768
    """`max_tokens`, of each phase (reasoning and answer count apart). 0 is for requests about the prompt alone."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of the chosen token and of the k most likely ones."""
    allowed_ids: tuple[int, ...] = ()
    """Empty: all."""
    suppressed_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its score), each id once."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Decided by the skill, on the host."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", tokens_or_none("max_tokens", self.max_new_tokens))
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise RequestError("logit_bias", "names an id twice; give each id once")
        for name, default, kind in CHECKED_FIELDS:
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, kind(name, dict(value) if name == "logit_bias" else value))
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                "min_tokens", f"must not exceed max_tokens ({self.max_new_tokens}) (got {self.min_tokens})"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


# ---------------------------------------------------------------------- bounds


MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 64
MAX_SEED = 2**63 - 1
MAX_OBJECTS = 10_000
CAPTION_LENGTHS = ("short", "normal", "long")
INSTANCES = ("one", "all")
MAX_NAMES = 64
"""Of objects, in one call."""
MAX_CROPS = 1024
"""A model has a bound of its own, which is far lower."""
MAX_LOGIT_BIAS = 300
MAX_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOPS_CHARACTERS = 4000
"""Of all together: every token is searched for all of them."""
MAX_TEMPERATURE = 2.0
"""What clients of the OpenAI API may send; above it a text is hardly more than chance."""
MIN_REPETITION_PENALTY = 0.01
"""Scores are divided by it; far smaller ones would leave the range of float32."""
MAX_PRIORITY = 1_000_000
MAX_NAME_LENGTH = 256

Schema: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[str, Any], Any]
"""Takes a field's name and raw value; returns the typed value or raises RequestError."""


# ---------------------------------------------------------------------- what a value may be


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be, twice: as a check, and as JSON Schema. Called, it checks."""

    check: Check
    schema: Schema

    def __call__(self, name: str, value: Any) -> Any:
        return self.check(name, value)


def whole(value: Any) -> Any:
    """5.0 as 5: JSON has one type of number. A parser reads integers of more than 64 bits as floats too."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def whole_numbers(values: Sequence[Any]) -> Sequence[Any]:
    """The same for all entries; without Python code per entry where there is nothing to do."""
    return list(map(whole, values)) if float in set(map(type, values)) else values


def integer(low: int, high: int) -> Kind:
    def check(name: str, value: Any) -> int:
        value = whole(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
        return value

    return Kind(check, {"type": "integer", "minimum": low, "maximum": high})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(low: float, high: float) -> Kind:
    def check(name: str, value: Any) -> float:
        if not is_number(value) or not low <= value <= high:
            raise RequestError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")
        return float(value)

    return Kind(check, {"type": "number", "minimum": low, "maximum": high})


def _boolean(name: str, value: Any) -> bool:
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


def _visible_text(name: str, value: Any) -> str:
    if not any_text(name, value).strip():
        raise RequestError(name, "is empty; give some text")
    return value


boolean = Kind(_boolean, {"type": "boolean"})
text = Kind(_visible_text, {"type": "string", "pattern": r"\S"})
"""At least one visible character, kept as given."""


def short_text(most: int) -> Kind:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= most:
            raise RequestError(name, f"must be a string of 1 to {most} characters (got {shown(value)})")
        return value

    return Kind(check, {"type": "string", "minLength": 1, "maxLength": most})


def _require_few(name: str, num_entries: int, most: int) -> None:
    if num_entries > most:
        raise RequestError(name, f"has {num_entries} entries; give at most {most}")


def are_ids(values: Sequence[Any], largest: int) -> bool:
    """Whether all are integers from 0 to `largest`; long lists without Python code per entry."""
    if countOf(map(type, values), int) < len(values):
        return False
    try:
        array("I", values)  # refuses numbers below 0 in half the time that min takes
    except OverflowError:
        return False
    return max(values, default=0) <= largest


def id_list(least: int = 0, most: int | None = None) -> Kind:
    """Token ids. Without `most`, the engine's vocabulary is the bound."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise RequestError(name, f"must be a list of token ids (got {shown(value)})")
        if len(value) < least:
            raise RequestError(name, "is an empty list; name at least one token id or leave it out")
        _require_few(name, len(value), len(value) if most is None else most)
        return tuple(value) if are_ids(value, MAX_TOKEN_ID) else _rounded_ids(name, value)

    bounds = {"minItems": least or None, "maxItems": most}
    items = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
    return Kind(check, {"type": "array", "items": items, **{k: v for k, v in bounds.items() if v is not None}})


def _rounded_ids(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    ids = tuple(whole_numbers(values))
    if not are_ids(ids, MAX_TOKEN_ID):
        index = next(index for index, one in enumerate(ids) if not are_ids([one], MAX_TOKEN_ID))
        raise RequestError(name, f"must hold token ids only; entry {index} is {shown(ids[index])}")
    return ids


token_ids, some_token_ids = id_list(), id_list(least=1)


def _stop_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or a few, kept as given, blanks and all."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        raise RequestError(name, f"must be a text or a list of texts (got {shown(value)})")
    _require_few(name, len(texts), MAX_STOPS)
    for one in texts:
        if not 0 < len(any_text(name, one)) <= MAX_STOP_CHARACTERS:
            raise RequestError(name, f"must be texts of 1 to {MAX_STOP_CHARACTERS} characters (got {shown(one)})")
    if (num_characters := sum(map(len, texts))) > MAX_STOPS_CHARACTERS:
        raise RequestError(name, f"has {num_characters} characters in all; give at most {MAX_STOPS_CHARACTERS}")
    return tuple(texts)


_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
stop_texts = Kind(_stop_texts, {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]})


def object_names(given: object) -> tuple[str, ...]:
    """Distinct names, checked; an error names the entry, as in object[2]."""
    names = given if isinstance(given, (list, tuple)) else [given]
    if not 0 < len(names) <= MAX_NAMES:
        raise RequestError("object", f"must hold 1 to {MAX_NAMES} names (got {len(names)})")
    checked: dict[str, None] = {}
    for index, name in enumerate(names):
        field = f"object[{index}]" if names is given else "object"
        word: str = text(field, name)
        if word in checked:
            raise RequestError(field, f"{shown(word)} is given twice; give each name once")
        checked[word] = None
    return tuple(checked)


_ID_DIGITS = len(str(MAX_TOKEN_ID))
_BIASES = f"from {-MAX_BIAS:g} to {MAX_BIAS:g}"


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A mapping from ids, also as strings of digits, to numbers; sorted by id."""
    if not isinstance(value, Mapping):
        raise RequestError(name, f"must map token ids to numbers {_BIASES} (got {shown(value)})")
    _require_few(name, len(value), MAX_LOGIT_BIAS)
    bias: dict[int, float] = {}
    for key, added in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS
        (token_id,) = token_ids(name, [int(key) if is_digits else key])
        if token_id in bias:
            raise RequestError(name, f"names id {token_id} twice; give each id once")
        if not is_number(added) or not -MAX_BIAS <= added <= MAX_BIAS:
            raise RequestError(name, f"must map id {token_id} to a number {_BIASES} (got {shown(added)})")
        bias[token_id] = float(added)
    return tuple(sorted(bias.items()))


logit_bias = Kind(
    _logit_bias,
    {
        "type": "object",
        "additionalProperties": number(-MAX_BIAS, MAX_BIAS).schema,
        "propertyNames": {"pattern": f"^[0-9]{{1,{_ID_DIGITS}}}$"},
        "maxProperties": MAX_LOGIT_BIAS,
    },
)

tokens_or_none = integer(0, MAX_TOKENS)
"""`max_tokens` where outputs of the prompt are asked for: with 0 nothing is generated."""


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `meaning` is the line that the API's description, the docs and `--help` have for it."""

    name: str
    kind: Kind
    meaning: str
    default: str | None = None
    """What holds when it is not given, where that is not the default of `SamplingParams`."""
    other_names: tuple[str, ...] = ()
    openai: tuple[str, ...] | None = None
    """Its names in the OpenAI API; None: its own. Empty: not offered, or in a form that the routes read."""
    in_words: bool = False
    """Only for answers in words: points, boxes and outlines have a form of their own that it would break."""
    has_flag: bool = False
    """Whether the command line offers it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    @property
    def openai_names(self) -> tuple[str, ...]:
        return (self.name,) if self.openai is None else self.openai

    @property
    def schema(self) -> Schema:
        return {**self.kind.schema, "description": self.meaning}


def _by_name(*settings: Setting) -> Mapping[str, Setting]:
    return {setting.name: setting for setting in settings}


_ITS_OWN = "the model's own"
_PENALTY = number(-2.0, 2.0)
SETTINGS = _by_name(
    Setting("max_tokens", integer(1, MAX_TOKENS),
            "Longest answer in tokens. Moondream may think for as many more; thoughts of text models count.",
            _ITS_OWN, ("max_new_tokens",), ("max_tokens", "max_completion_tokens"), has_flag=True),
    Setting("max_objects", integer(1, MAX_OBJECTS),
            "Most objects to find; point and detect take it instead of `max_tokens`.",
            _ITS_OWN, openai=(), has_flag=True),
    Setting("temperature", number(0.0, MAX_TEMPERATURE), "0 takes the most likely token; higher values vary more.",
            f"{_ITS_OWN}; 0 for points, boxes and outlines", has_flag=True),
    Setting("top_p", number(0.0, 1.0),
            "Sample from the most likely tokens that together reach this probability; 0 takes the most likely one.",
            f"{_ITS_OWN}; 1 for points, boxes and outlines", has_flag=True),
    Setting("top_k", integer(-1, MAX_TOKENS), "Sample from this many of the most likely tokens; 0 or -1 for all.",
            f"{_ITS_OWN}, or 0", has_flag=True),
    Setting("min_p", number(0.0, 1.0), "Leave out tokens whose probability is below this share of the highest one.",
            f"{_ITS_OWN}, or 0", has_flag=True),
    Setting("seed", integer(-MAX_SEED - 1, MAX_SEED), "The same request with the same seed gets the same answer.",
            "drawn for each request", has_flag=True),
    Setting("logprobs", integer(0, MAX_LOGPROBS),
            "Add the log-probability of each token, and of this many others that were likely.",
            openai=(), has_flag=True),
    Setting("max_crops", integer(1, MAX_CROPS),
            "Most crops that a picture is cut into: fewer are faster, with less detail.",
            _ITS_OWN, has_flag=True),
    Setting("adapter", text, "Name of the adapter to answer with.", "none", ("variant",), ("adapter",), has_flag=True),
    Setting("allowed_ids", some_token_ids, "Only these token ids may be sampled.", "all",
            openai=("allowed_token_ids",)),
    Setting("suppressed_ids", token_ids, "These token ids are never sampled.", openai=()),
    Setting("presence_penalty", _PENALTY, "Subtracted once from the score of every token generated, thinking included.",
            in_words=True),
    Setting("frequency_penalty", _PENALTY, "Subtracted from a token's score each time it is generated.", in_words=True),
    Setting("repetition_penalty", number(MIN_REPETITION_PENALTY, 2.0),
            "Divides a positive score, and multiplies a negative one, of every token generated or in the prompt.",
            f"{_ITS_OWN}, or 1", in_words=True),
    Setting("logit_bias", logit_bias, "Numbers to add to the scores of token ids.", in_words=True),
    Setting("min_tokens", integer(0, MAX_TOKENS), "Fewest tokens of an answer; `stop` may still end it earlier.",
            in_words=True),
    Setting("ignore_eos", boolean, "The model cannot end the answer; only its limit or a stop does.", in_words=True),
    Setting("stop_token_ids", id_list(most=MAX_STOP_TOKEN_IDS), "Token ids that end the answer; not part of its text.",
            in_words=True),
    Setting("stop", stop_texts, "The answer ends right before the first of these texts.", in_words=True),
)  # fmt: skip
"""How tokens are chosen and when they end, by name."""

CANONICAL_NAMES = {name: setting.name for setting in SETTINGS.values() for name in setting.names}
CHECKED_FIELDS = [
    (one.name, one.default, SETTINGS[one.name].kind) for one in fields(SamplingParams) if one.name in SETTINGS
]

OTHER_BOUND = {"max_tokens": "max_objects", "max_objects": "max_tokens"}
"""A skill is bounded by tokens or by objects; the other bound is refused rather than ignored."""

ROUTING = _by_name(
    Setting("priority", integer(-MAX_PRIORITY, MAX_PRIORITY), "Lower runs sooner; below 0 needs an urgent key.", "0"),
    Setting("request_id", short_text(MAX_NAME_LENGTH), "A name for this request; no other running request may have it.",
            "a random one", openai=()),
    Setting("cache_salt", short_text(MAX_NAME_LENGTH),
            "Share cached pictures and prompts only with requests that have the same `cache_salt`.", "none"),
)  # fmt: skip
"""What a request says to the engine itself; never inside `settings`."""
