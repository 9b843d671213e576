"""What each parameter of a generation means here: a setting of the engine, a matter of the server, or a refusal."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from kestrel.errors import RequestError, cut, did_you_mean, shown
from kestrel.settings import MAX_SEED, ROUTING, SETTINGS, Kind, Schema, Setting, boolean, integer, whole

CHOICES = integer(1, 128)
"""Answers one request may ask for (`n`)."""

Body: TypeAlias = Mapping[str, Any]

LIKENESS = 0.85
"""From which on an unknown name is taken for a misspelt one, by the measure of difflib."""
FEW_LETTERS = 3
"""That only one of two similar names has: looked at first, because difflib is slow."""
MAX_NAME = 40
"""Characters of a name that is compared with the known ones; those have fewer."""
MAX_FOREIGN = 32
"""Different names in one request that are not known: comparing each takes time."""
MAX_FOREIGN_SHOWN = 8
"""In the warning of one answer."""

PARAMETERS: Mapping[str, Setting] = {
    name: setting for setting in (*SETTINGS.values(), *ROUTING.values()) for name in setting.openai_names
}
"""The settings that OpenAI's routes offer, by its own names for them."""


@dataclass(frozen=True)
class Refusal:
    """A parameter of OpenAI's API that has no meaning here; the harmless values of it may be sent."""

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
    return schemas


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one of several choices; the first has the seed itself, so that it says what it says alone."""
    return (seed + choice * 0x9E3779B97F4A7C15) % (MAX_SEED + 1)


UNUSED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("spaces_between_special_tokens", "guided_decoding_backend", "guided_decoding_disable_fallback"),
    *("kv_transfer_params", "rid", "session_id", "extra_key", "custom_labels", "stream_reasoning"),
    *("return_cached_tokens_details", "cache_prompt", "keep_alive"),
)
"""Of OpenAI and of other servers, taken without effect: none of them changes the text of an answer."""
LENGTHS = ("max_new_tokens", "max_output_tokens", "max_length", "n_predict", "num_predict")
THINKING = ("think", "thinking", "enable_thinking")
_THINKING = Refusal("use reasoning: true or false, or chat_template_kwargs for the model's own template")
_SAMPLING = Refusal("there is no such sampling; leave it out, and use top_p, top_k or min_p", (0, 1))
_PICTURE = Refusal("it belongs to the routes of skills such as /v1/query; send messages here")
_OTHER_NAMES: Mapping[str, Refusal] = {
    **dict.fromkeys(LENGTHS, Refusal("use max_tokens")),
    "min_new_tokens": Refusal("use min_tokens"),
    "allowed_ids": Refusal("use allowed_token_ids"),
    "suppressed_ids": Refusal("give these ids -100 in logit_bias"),
    "variant": Refusal("use adapter, or write model: name/adapter"),
    "max_objects": Refusal("it is for /v1/point and /v1/detect; leave it out"),
    "request_id": Refusal("send it in the header X-Request-Id"),
    "settings": Refusal("write each setting directly into the body, such as temperature"),
    "options": Refusal("write each of them directly into the body, such as temperature"),
    "extra_body": Refusal("write its fields directly into the body; only Python clients have an extra_body"),
    "stop_sequences": Refusal("use stop"),
    "streaming": Refusal("use stream"),
    "temp": Refusal("use temperature"),
    "repeat_penalty": Refusal("use repetition_penalty"),
    "grammar": Refusal("use a response_format of type regex or json_schema"),
    **dict.fromkeys(("format", "output_format", "output_config", "text"), Refusal("use response_format")),
    **dict.fromkeys(THINKING, _THINKING),
    **dict.fromkeys(("typical_p", "top_a", "tfs_z", "mirostat"), _SAMPLING),
    "reasoning_format": Refusal("thoughts are in reasoning_content; leave it out", ("auto", "parsed", "deepseek")),
}
"""What Kestrel itself or other servers call something. Ignoring it would answer another request than was meant."""
REMEDIES: Mapping[str, str] = {name: refusal.remedy for name, refusal in _OTHER_NAMES.items()}
"""The same for routes with other names for some of them."""
_STOP_TEXT = Refusal("the text ends before the stop text; leave it out and add that yourself", (False,))
_IDS = Refusal("ids are not shown; leave it out and ask POST /tokenize for those of a text", (False,))
_PROCESSORS = Refusal("code in a request is never run; use logit_bias, allowed_token_ids or a response_format", ([],))
_VECTORS = Refusal("prompts are text or token ids; leave it out")
_REFUSED: Mapping[str, Refusal] = {
    **_OTHER_NAMES,
    "use_beam_search": Refusal("there is no beam search; leave it out, and set n for several choices", (False,)),
    "length_penalty": Refusal("there is no beam search; leave it out or send 1", (1,)),
    "early_stopping": Refusal("there is no beam search; leave it out", (False,)),
    "truncate_prompt_tokens": Refusal("prompts are never cut; shorten it, POST /tokenize counts its tokens"),
    "prompt_logprobs": Refusal("leave it out, and set echo and logprobs in /v1/completions"),
    "logprob_token_ids": Refusal("leave it out, and ask for more top_logprobs (chat) or logprobs (completions)"),
    "include_stop_str_in_output": _STOP_TEXT,
    "no_stop_trim": _STOP_TEXT,
    "stop_regex": Refusal("use stop, or a response_format of type regex", ([], "")),
    "skip_special_tokens": Refusal("special tokens have no text; leave it out, logprobs name them", (True,)),
    "bad_words": Refusal("leave it out, and give their token ids -100 in logit_bias", ([],)),
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "repetition_detection": Refusal("leave it out, and set repetition_penalty or frequency_penalty"),
    "thinking_token_budget": Refusal("leave it out, and set max_tokens", (-1,)),
    "lora_path": Refusal("write the adapter after the name of the model: model/adapter"),
    "prompt_embeds": _VECTORS,
    "input_embeds": _VECTORS,
    "return_tokens_as_token_ids": _IDS,
    "return_token_ids": _IDS,
    "return_hidden_states": Refusal("leave it out, and ask /v1/embeddings for vectors", (False,)),
}
"""What vLLM and SGLang take and would change an answer."""
REFUSED_IN_CHAT: Mapping[str, Refusal] = {
    **_REFUSED,
    **dict.fromkeys(("prompt", "input"), Refusal("use messages")),
    **dict.fromkeys(("system", "instructions"), Refusal("send a message with the role system")),
    **dict.fromkeys(("question", "image_url", "image"), _PICTURE),
    "suffix": Refusal("text is continued, not filled in; leave it out", ("",)),
    "moderation": Refusal("nothing is moderated here; leave it out"),
    "verbosity": Refusal('leave it out or send "medium", and write into a message how long to answer', ("medium",)),
    "functions": Refusal("tools have replaced it; send tools", ([],)),
    "function_call": Refusal("tool_choice has replaced it; send tool_choice", ("none", "auto")),
    "modalities": Refusal('answers are text; leave it out or send ["text"]', (["text"],)),
    "audio": Refusal("answers are text; leave it out"),
    "web_search_options": Refusal("the web is not searched; leave it out"),
    "echo": Refusal("an answer does not repeat the prompt; leave it out", (False,)),
    "add_special_tokens": Refusal("conversations have their own; leave it out", (False,)),
    "chat_template": Refusal("the model's own is used; leave it out, or start with --chat-template FILE"),
    "documents": Refusal("write them into a message", ([],)),
    "mm_processor_kwargs": Refusal("pictures are read in one way; leave it out", ({},)),
    "separate_reasoning": Refusal("thoughts are always in reasoning_content; leave it out", (True,)),
}
_OF_EMBEDDINGS = ("adapter", "max_crops", "priority", "cache_salt")
REFUSED_IN_EMBEDDINGS: Mapping[str, Refusal] = {
    **dict.fromkeys(
        (name for name in (*PARAMETERS, *_OTHER_NAMES) if name not in _OF_EMBEDDINGS),
        Refusal("an embedding generates nothing; leave it out"),
    ),
    **{name: _OTHER_NAMES[name] for name in ("variant", "request_id", "extra_body")},
    "settings": Refusal("write adapter, max_crops, priority and cache_salt directly into the body"),
    **dict.fromkeys(("prompt", "text", "image_url", "image"), Refusal("use input")),
    "truncate_prompt_tokens": Refusal("inputs are never cut; cut the ids that POST /tokenize gives, and send those"),
    "normalize": Refusal("vectors have length 1; leave it out or send true", (True,)),
    "add_special_tokens": Refusal("the beginning of text is always there; leave it out or send true", (True,)),
    "messages": Refusal("send the texts, or parts with a picture, as input"),
    "embed_dtype": Refusal('vectors are of 32-bit floats; leave it out or send "float32"', ("float32",)),
    "endianness": Refusal('base64 is little-endian; leave it out or send "little"', ("little", "native")),
}
REFUSED_IN_TOKENIZE: Mapping[str, Refusal] = {
    "return_token_strs": Refusal("leave it out, and ask POST /detokenize for the text of ids", (False,)),
}
_IN_CHATS = Refusal("it belongs to conversations; use /v1/chat/completions", ([], {}, False, "none", "auto"))
REFUSED_IN_COMPLETIONS: Mapping[str, Refusal] = {
    **_REFUSED,
    "suffix": Refusal("text is continued, not filled in; leave it out", ("",)),
    **dict.fromkeys(("input", "text"), Refusal("use prompt")),
    **dict.fromkeys(("image_url", "image"), Refusal("prompts are text; send pictures to /v1/chat/completions")),
    "top_logprobs": Refusal("use logprobs, which is their number here", (0,)),
    **dict.fromkeys(
        ("messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "continue_final_message",
         "reasoning", "reasoning_effort"),
        _IN_CHATS,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------- reading a body


def given(body: Body) -> dict[str, Any]:
    """The body without nulls: null means not given, everywhere."""
    return {name: value for name, value in body.items() if value is not None}


def type_of(name: str, value: Any, known: Mapping[str, Any]) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise RequestError(name, f'must be {{"type": …}} with one of: {", ".join(known)} (got {shown(value)})')
    return kind


def require_known(
    place: str, value: Mapping[str, Any], known: Sequence[str], remedies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """`remedies`: what to use in place of names that clients know from elsewhere."""
    for name in value:
        if name not in known and name in remedies:
            raise RequestError(f"{place}{name}", f"is not supported here: {remedies[name]}")
        if name not in known:
            close = did_you_mean(name, known)
            raise RequestError(f"{place}{name}", f"is not supported here; known fields: {', '.join(known)}{close}")


class ForeignFields:
    """Names in one request that are not known here and have no effect. Null means not given."""

    def __init__(self) -> None:
        self._places: dict[tuple[frozenset[str], str], str] = {}
        """Of each name among the fields of one kind of object, where it stood first."""

    def note(
        self, place: str, value: Mapping[str, Any], known: frozenset[str], unused: frozenset[str] = frozenset()
    ) -> None:
        """Refuses a name that was meant for a known one. `unused` are known too, and have no effect."""
        for name in value:
            if name in known or name in unused or value[name] is None or (known, name) in self._places:
                continue
            if len(self._places) == MAX_FOREIGN:
                problem = f"is one of more than {MAX_FOREIGN} fields that are not known here; leave them out"
                raise RequestError(f"{place}{name}", problem)
            meant = _meant(name, known)
            if meant is None and name.startswith("guided_"):
                meant = "guided_json, guided_regex or guided_choice"
            if meant is not None and value.get(meant) is None:
                raise RequestError(f"{place}{name}", f"is not known here; did you mean {meant}?")
            self._places[known, name] = f"{place}{cut(name, MAX_NAME)}"

    @property
    def warnings(self) -> list[str]:
        """For the answer."""
        names = list(self._places.values())
        if not names:
            return []
        more = f" and {len(names) - MAX_FOREIGN_SHOWN} more" if len(names) > MAX_FOREIGN_SHOWN else ""
        return [f"Not known here and without effect: {', '.join(names[:MAX_FOREIGN_SHOWN])}{more}."]


def _meant(name: str, known: frozenset[str]) -> str | None:
    """The known name that one was meant to be: `maxTokens`, `max-tokens`, `max_token`."""
    if len(name) > MAX_NAME:
        return None
    plain = _plain(name)
    letters = frozenset(plain)
    near = {one: full for one, (full, its) in _spellings(known).items() if len(letters ^ its) <= FEW_LETTERS}
    close = difflib.get_close_matches(plain, near, n=1, cutoff=LIKENESS)
    return near[close[0]] if close else None


@cache
def _spellings(known: frozenset[str]) -> Mapping[str, tuple[str, frozenset[str]]]:
    """Plain spellings of the names that have an effect, each with the name and its letters."""
    return {_plain(name): (name, frozenset(_plain(name))) for name in sorted(known.difference(UNUSED))}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def require_list(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise RequestError(name, f"must be a list (got {shown(value)})")


def refuse(body: Body, refusals: Mapping[str, Refusal]) -> None:
    for name, refusal in refusals.items():
        if name in body and body[name] not in refusal.harmless:
            raise RequestError(name, f"is not supported: {refusal.remedy}")


def take_settings(body: Body) -> EngineFields:
    fields = EngineFields()
    for name, setting in PARAMETERS.items():
        if name in body:
            fields.add(setting.name, name, whole(body[name]))
    return fields


def take_choices(body: Body) -> int:
    num_choices = CHOICES("n", body.get("n", 1))
    if CHOICES("best_of", body.get("best_of", num_choices)) != num_choices:
        remedy = f"set n ({num_choices}) to get as many choices, or leave it out"
        raise RequestError("best_of", f"is not supported: {remedy}")
    return num_choices


@dataclass(frozen=True)
class StreamOptions:
    """Whether to stream, and which usage to send on the way."""

    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


_STREAM_OPTIONS = frozenset(("include_usage", "continuous_usage_stats"))
_UNUSED_STREAM_OPTIONS = frozenset(("include_obfuscation",))


def take_stream(body: Body, foreign: ForeignFields) -> StreamOptions:
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
    foreign.note("stream_options.", options, _STREAM_OPTIONS, _UNUSED_STREAM_OPTIONS)
    flags = []
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        flags.append(value is not None and boolean(f"stream_options.{name}", value))
    return StreamOptions(stream, include_usage=flags[0], continuous_usage=flags[1])
