"""A model's own chat template (jinja), rendered in a sandbox. What the template says is told from what a request says.

A rendering is cut at the control strings that the template itself wrote; everything else in it is plain text, so that
no text of a request becomes a control id. To tell the two apart, the characters that control strings begin and end with
are replaced in the request's texts by private-use characters before rendering, and put back afterwards. For the
template such a `MarkedText` is the original: searching, comparing, splitting and stripping see the original characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, SupportsIndex

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrel.errors import KestrelError, RequestError

RESERVED = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
"""Names in a template that no request may set otherwise."""
NOT_GIVEN = {"tools": None, "documents": None}
"""What templates of the hub expect to be defined."""
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class TemplateFault(KestrelError):
    """The text is no jinja template."""


class _Refusal(jinja2.TemplateError):
    """What a template says by `raise_exception`."""


class ChatTemplate:
    """One template with the special tokens that it may name and the strings that it may write as control ids."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], controls: Iterable[str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._controls = tuple(sorted(controls, key=len, reverse=True))
        self._found = re.compile(f"({'|'.join(map(re.escape, self._controls)) or '(?!)'})")
        self._edges = sorted({edge for control in self._controls for edge in _edges(control)})
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFault(f"line {error.lineno}: {error.message}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.text, self._special_tokens, self._controls)

    def mentions(self, word: str) -> bool:
        return re.search(rf"\b{re.escape(word)}\b", self.text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[str]:
        """Plain text and control strings in turn; the first and the last part are text.

        `values` are further variables for the template. Roles are the caller's own words. With `continues` the
        rendering ends where the last message's text ends.
        """

        def rendered(messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
            known = {**NOT_GIVEN, **self._special_tokens, **values}
            text = self._run({**known, "messages": messages, "add_generation_prompt": add_generation_prompt})
            return _up_to_the_end_of(messages[-1]["content"], text) if continues else text

        plain = rendered(messages, values)
        texts = list(_texts([{**message, "role": ""} for message in messages])) + list(_texts(values))
        if not any(edge in text for text in texts for edge in self._edges):
            return self._found.split(plain)
        twins = _Twins(self._edges, set(plain).union(*texts))
        marked_messages = [{**twins.marked(dict(message)), "role": message["role"]} for message in messages]
        marked = rendered(marked_messages, {name: twins.marked(value) for name, value in values.items()})
        return self._settled(plain, self._found.split(marked), texts, twins)

    def _settled(self, plain: str, parts: list[str], texts: Sequence[str], twins: _Twins) -> list[str]:
        """The marked rendering decides which control strings are the template's.

        Where the template made something else of marked texts, the plain rendering is taken if it has the same control
        strings and no text has one; otherwise the template saw the texts' control strings as other characters.
        """
        restored = [twins.restored(part) for part in parts]
        if "".join(restored) != plain and not any(self._found.search(text) for text in texts):
            plain_parts = self._found.split(plain)
            if plain_parts[1::2] == parts[1::2]:
                return plain_parts
        return restored

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except _Refusal as error:
            raise RequestError("messages", str(error)) from error
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"do not fit the model's chat template: {error.message}") from error
        except Exception as error:  # the template's own code, on values that a client chose
            problem = f"do not fit the model's chat template ({type(error).__name__})"
            raise RequestError("messages", problem) from error


def _edges(control: str) -> tuple[str, str]:
    """First and last character that are no blanks: templates strip those."""
    visible = control.strip() or control
    return visible[0], visible[-1]


def _texts(value: Any) -> Iterator[str]:
    """Every string inside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value))
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


def _up_to_the_end_of(text: str, rendering: str) -> str:
    """Cut behind the last place where the text stands, its outer blanks included if they are there."""
    core = text.strip()
    at = rendering.rfind(core) if core else -1
    if at < 0:
        raise RequestError(
            "continue_final_message", "cannot be done: the chat template does not write the last message as it is"
        )
    tail = text.lstrip()
    return rendering[: at + len(tail if rendering.startswith(tail, at) else core)]


# ---------------------------------------------------------------------- the sandbox


def _environment() -> ImmutableSandboxedEnvironment:
    """As templates of the hub expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class _GenerationBlocks(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what an assistant said, for training; it writes its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(content, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


# ---------------------------------------------------------------------- texts of a request, marked


class _Twins:
    """Private-use characters that stand for others while a template is rendered."""

    def __init__(self, characters: Sequence[str], taken: set[str]) -> None:
        """`taken`: characters that mean themselves."""
        size = len(characters)
        blocks = (
            [chr(first + offset) for offset in range(size)]
            for first in range(PRIVATE_USE.start, PRIVATE_USE.stop - size, size)
        )
        free = next((block for block in blocks if taken.isdisjoint(block)), None)
        if free is None:
            raise RequestError("messages", "hold too many private-use characters (U+F0000 and up); leave some out")
        self._pairs = list(zip(characters, free, strict=True))

    def marked(self, value: Any) -> Any:
        """The same value with marked texts in it."""
        if isinstance(value, str):
            shown = value
            for character, twin in self._pairs:
                shown = shown.replace(character, twin)
            return value if shown == value else MarkedText.of(shown, value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(inner) for inner in value]
        return value

    def restored(self, text: str) -> str:
        for character, twin in self._pairs:
            text = text.replace(twin, character)
        return text


class MarkedText(str):
    """A text whose characters are written as others of the same number, and which looks like the original inside.

    What is cut out of it or joined to it stays marked. Whatever else makes a string of it gets the written characters.
    """

    _original: str

    @staticmethod
    def of(shown: str, original: str) -> MarkedText:
        new = str.__new__(MarkedText, shown)
        new._original = original
        return new

    def __str__(self) -> str:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._original == _original(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._original)

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and _original(part) in self._original

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return MarkedText.of(str.__getitem__(self, key), self._original[key])

    def __add__(self, other: str) -> str:
        return MarkedText.of(str.__add__(self, other), self._original + _original(other))

    def __radd__(self, other: str) -> str:
        return MarkedText.of(str.__add__(other, self), _original(other) + self._original)

    def find(self, part: str, *bounds: Any) -> int:
        return self._original.find(_original(part), *bounds)

    def rfind(self, part: str, *bounds: Any) -> int:
        return self._original.rfind(_original(part), *bounds)

    def index(self, part: str, *bounds: Any) -> int:
        return self._original.index(_original(part), *bounds)

    def rindex(self, part: str, *bounds: Any) -> int:
        return self._original.rindex(_original(part), *bounds)

    def count(self, part: str, *bounds: Any) -> int:
        return self._original.count(_original(part), *bounds)

    def startswith(self, prefix: str | tuple[str, ...], *bounds: Any) -> bool:
        return self._original.startswith(_originals(prefix), *bounds)

    def endswith(self, suffix: str | tuple[str, ...], *bounds: Any) -> bool:
        return self._original.endswith(_originals(suffix), *bounds)

    def removeprefix(self, prefix: str) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def lstrip(self, characters: str | None = None) -> str:
        return self[len(self) - len(self._original.lstrip(_original(characters))) :]

    def rstrip(self, characters: str | None = None) -> str:
        return self[: len(self._original.rstrip(_original(characters)))]

    def strip(self, characters: str | None = None) -> str:
        return self.lstrip(characters).rstrip(characters)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(self._original.split(_original(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(self._original.rsplit(_original(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        pairs = zip(str.splitlines(self, keepends), self._original.splitlines(keepends), strict=True)
        return [MarkedText.of(shown, original) for shown, original in pairs]

    def partition(self, sep: str) -> tuple[str, str, str]:
        at = self.find(sep)
        return (self, "", "") if at < 0 else (self[:at], sep, self[at + len(sep) :])

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        at = self.rfind(sep)
        return ("", "", self) if at < 0 else (self[:at], sep, self[at + len(sep) :])

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        first, *others = self.split(old, count)
        for part in others:
            first = first + new + part
        return first

    def lower(self) -> str:
        return MarkedText.of(str.lower(self), self._original.lower())

    def upper(self) -> str:
        return MarkedText.of(str.upper(self), self._original.upper())

    def _cut(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of the original, found again one after the other."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            if sep is None:
                at = self._original.index(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found


def _original(text: Any) -> Any:
    return text._original if isinstance(text, MarkedText) else text


def _originals(text: str | tuple[str, ...]) -> Any:
    return tuple(map(_original, text)) if isinstance(text, tuple) else _original(text)
