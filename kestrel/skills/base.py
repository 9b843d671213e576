"""What a skill is: fields in, prompt and grammar, typed tokens, result out. No torch.

One request walks through three calls: `parse` turns raw fields into a typed request, `prompt` lays it out as context
items with decode rules, `start` gives the object that turns tokens into stream deltas and the final result.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kestrel.constraints import ResponseFormat
from kestrel.errors import RequestError, did_you_mean
from kestrel.grammar import Grammar
from kestrel.request import (
    Constraint,
    FinishReason,
    PromptOutputs,
    PromptReport,
    SkillOutput,
    StreamDelta,
    TokenConstraint,
    TokenLogprobs,
)
from kestrel.settings import SamplingParams
from kestrel.skills.model_facts import SkillDefaults, Template
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, TextToken, Token


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special-token strings inside it are plain text too."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special ids left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id adds to a text; none for a special id."""
        ...

    def token_name(self, token_id: int) -> str | None:
        """The vocabulary's own entry, which names special ids; None for an unknown id."""
        ...


class ConstraintSource(Protocol):
    def start(self, wanted: ResponseFormat) -> TokenConstraint:
        """A constraint for one answer, compiled if need be. Raises RequestError for formats that cannot be kept."""
        ...

    def is_kept(self, wanted: ResponseFormat) -> bool:
        """Whether `start` would find it compiled. Never waits."""
        ...

    def prepare(self) -> None:
        """What the first format would have to wait for; it may take a while and hold the interpreter."""
        ...

    def close(self) -> None:
        """Stop compiling; who waits for it gets an error."""
        ...


@dataclass(frozen=True, slots=True)
class RegionIds:
    """Ids of tokens that carry a coordinate or a size, and the marks around what a thought points at."""

    coord: int
    size: int
    start_ground: int
    end_ground: int


SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    field: str
    """Its name in errors, as in messages[2]."""
    role: str
    text: str
    images: tuple[Any, ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields, by name."""


def joined_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """One system message at the front, and neighbours of one role as one message, line by line.

    Messages with further fields, and results of tools, stay alone.
    """
    groups: list[list[Message]] = []
    for message in sorted(messages, key=lambda message: message.role not in SYSTEM_ROLES):
        if groups and _are_one(groups[-1][-1], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return tuple(_joined(group) for group in groups)


def _are_one(one: Message, other: Message) -> bool:
    share_role = one.role == other.role or {one.role, other.role} <= SYSTEM_ROLES
    return share_role and one.role != "tool" and not one.extra and not other.extra


def _joined(group: Sequence[Message]) -> Message:
    if len(group) == 1:
        return group[0]
    images = tuple(image for message in group for image in message.images)
    return dataclasses.replace(
        group[0], text="\n".join(message.text for message in group if message.text), images=images
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is to be answered."""

    messages: tuple[Message, ...]
    reasoning: bool | None = None
    """Whether to think first; None: as the model does by itself."""
    opens_answer: bool = True
    """Whether to write the beginning of an answer behind the last message."""
    continues: bool = False
    """The answer goes on with the last message, which stays open."""
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """For the model's template, which may read them; nothing else does."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the answer may call, as templates of the hub expect them."""


@dataclass(frozen=True, slots=True)
class WrittenChat:
    """A conversation up to where the model goes on, not encoded yet."""

    conversation: Conversation
    parts: tuple[str, ...] = ()
    """Of formats that are templates: plain text and control strings in turn."""
    is_thinking: bool = False
    """Whether the model goes on inside of a thought."""


@dataclass(frozen=True, slots=True)
class ThinkingIds:
    """Ids around what a model thinks before its answer."""

    opens: int
    closes: int


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The same in models that have no ids for it and write it as text."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model is told of tools and writes calls of them."""

    name: str
    """Of its parser (`kestrel/skills/tool_parsers.py`)."""
    ids: Mapping[str, int]
    """Of its marks that are control tokens."""
    is_in_template: bool = True
    """The template writes tools and calls; otherwise they are written as texts of messages."""
    has_args_mark: bool = False
    """Of Mistral's two forms the one with [ARGS]."""
    has_blank: bool = False
    """Of Mistral's other form: a blank behind [TOOL_CALLS], as models with sentence pieces learnt it."""


class ChatFormat(Protocol):
    """How a model's conversations are written.

    They are written piece by piece: ids of the format stand around encoded text, so that nothing a user writes can
    become a control id.
    """

    @property
    def roles(self) -> tuple[str, ...]:
        """Who may say something."""
        ...

    @property
    def message_fields(self) -> tuple[str, ...]:
        """Fields that a message may have beside role and content."""
        ...

    @property
    def template(self) -> str | None:
        """The text of its template, where it has one."""
        ...

    @property
    def thinking(self) -> ThinkingIds | ThinkingTags | None:
        """What a model may put around thoughts by itself."""
        ...

    @property
    def tools(self) -> ToolForm | None:
        """How tools are called; None: they are not."""
        ...

    def write(self, conversation: Conversation) -> WrittenChat:
        """Raises RequestError for a conversation that cannot be written, naming the message where it can."""
        ...

    def items(self, profile: ModelProfile, written: WrittenChat, images: Sequence[ImageSpan]) -> Sequence[ContextItem]:
        """What was written, as a context. `images`: the pictures of all messages, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Everything that skills, servers and programs may know about the loaded model."""

    name: str
    tokenizer: Tokenizer
    bos: int | None
    """Opens every context; None: nothing does."""
    stop_ids: tuple[int, ...]
    """Each ends a text; the first is the one to name where a single one is asked for."""
    defaults: SkillDefaults = field(default_factory=SkillDefaults)
    has_vision: bool = False
    chat: ChatFormat | None = None
    """None: the model knows no conversations."""
    templates: Mapping[str, Template] = field(default_factory=dict)
    """By skill; captions as "caption.short", "caption.normal", "caption.long". A missing skill is not supported."""
    answer_opener: tuple[int, ...] = ()
    """Ids after a question that open a direct answer (Moondream 2 doubles the suffix)."""
    reasoning_opener: tuple[int, ...] = ()
    """Ids after a question that open thinking; empty when the model cannot reason."""
    answer_id: int | None = None
    """Ends thinking; it cannot come inside an answer."""
    regions: RegionIds | None = None
    """None: all its tokens are text."""
    compares_coord_and_eos_only: bool = False
    """Moondream 3: after an object only the coordinate and end ids compete for the next one."""
    last_control_id: int | None = None
    """Segment drops ids up to this one from an outline; None uses 20."""
    constraints: ConstraintSource | None = None
    """Compiles answer formats; without it `response_format` is refused."""

    @property
    def end_id(self) -> int:
        return self.stop_ids[0]

    @property
    def can_reason(self) -> bool:
        return bool(self.reasoning_opener) or (self.chat is not None and self.chat.thinking is not None)

    def id_of(self, token: Token) -> int:
        """The id that a token has in the context."""
        if isinstance(token, TextToken):
            return token.id
        assert self.regions is not None, "a model without regions gives text only"
        return self.regions.coord if isinstance(token, CoordToken) else self.regions.size


@dataclass(frozen=True, slots=True)
class Prompt:
    """A laid-out request."""

    items: Sequence[ContextItem]
    grammar: Grammar
    sampling: SamplingParams
    outputs: PromptOutputs | None = None
    """What the state wants to know of the prompt itself; it gets it by `consume_prompt`."""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class SkillRequest:
    """Base of every skill's parsed request. `images` are still encoded; the engine decodes them."""

    images: tuple[Any, ...] = field(default=(), kw_only=True)
    max_crops: int | None = field(default=None, kw_only=True)
    """Most local crops of each picture; None: as many as the model makes by itself."""
    adapter: str | None = field(default=None, kw_only=True)
    response_format: ResponseFormat | None = field(default=None, kw_only=True)
    """When given, `prompt` is called on a thread where it may compile for a while."""


RequestT = TypeVar("RequestT", bound=SkillRequest)


class SkillState(ABC):
    """Per request: consumes typed tokens, yields stream deltas, makes the result (a `TokenConsumer`)."""

    @abstractmethod
    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        """Take one token; return what it adds to a stream, if anything."""

    @abstractmethod
    def finish(self, reason: FinishReason) -> SkillOutput:
        """The result; called once, after the last token."""

    def consume_prompt(self, report: PromptReport) -> None:
        """Take the outputs of the prompt; called once, before the first token, if `Prompt.outputs` asks for some."""
        raise NotImplementedError(f"{type(self).__name__} asks for outputs of the prompt but takes none")

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:  # noqa: B027 - most skills show no ends
        """Take the id that ended the sequence; called before `flush`, only when log-probabilities are asked for."""

    def flush(self) -> StreamDelta | None:
        """What was held back from the stream; called once, before `finish`."""
        return None

    def nobody_reads(self) -> None:  # noqa: B027 - most skills have nothing to save
        """Only the result counts; called before the first token, if at all."""


class SkillSpec(ABC, Generic[RequestT]):
    """One skill. Stateless: everything of a request is in its request and state objects."""

    name: str
    yields_outline: bool = False
    """Whether results hold `segments` with a path that a refiner may sharpen."""
    finds_places: bool = False
    """Whether it looks for `object` on the picture. The engine adds pixels to the places that it finds, and runs a
    request per name where `object` is a list."""

    @abstractmethod
    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> RequestT:
        """Typed request from raw fields. Raises RequestError naming the first bad or unknown field."""

    @abstractmethod
    def prompt(self, request: RequestT, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        """Context items, grammar and sampling. `images` has one span per picture of the request, in order."""

    @abstractmethod
    def start(self, request: RequestT, profile: ModelProfile) -> SkillState:
        """A fresh state for one run of the request."""


class SkillRegistry:
    """The skills an engine offers, by name."""

    def __init__(self, skills: Iterable[SkillSpec[Any]]) -> None:
        self._skills: dict[str, SkillSpec[Any]] = {}
        for skill in skills:
            if skill.name in self._skills:
                raise ValueError(f"two skills are named {skill.name!r}; rename one")
            self._skills[skill.name] = skill

    def __iter__(self) -> Iterator[str]:
        return iter(self._skills)

    def __contains__(self, name: object) -> bool:
        return name in self._skills

    def get(self, name: str) -> SkillSpec[Any]:
        try:
            return self._skills[name]
        except KeyError:
            known, close = ", ".join(sorted(self._skills)), did_you_mean(name, self._skills)
            raise RequestError("skill", f"{name!r} is not registered; choose one of: {known}{close}") from None
