"""Calls of tools in the text of an answer, found while it is written: a parser for each form that models use.

A call begins with the name of a known tool; from then on its arguments are handed out as they come. What turns out to
be no call is text again, with its marks. Of a stream nothing can be taken back: there the arguments of a call that
breaks later stay as they are.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from kestrel.skills.states import open_stop

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(arguments|parameters)"\s*:\s*')
"""Of a call as an object, in the usual order of its keys; in another it is read once it is whole."""
NAMED_HEAD = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\][\w-]*\s*)?\[ARGS\]")
"""Of a call that is no object."""
MAX_HEAD = 256
"""Characters of such a head."""


# ---------------------------------------------------------------------- JSON, character by character


class JsonScanner:
    """Whether characters, one after another, are the beginning of a JSON value."""

    _NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
    _NUMBER_BEGUN = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?((?<=\d)[eE][+-]?\d*)?)?", re.ASCII)
    _LITERALS = ("true", "false", "null")

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets to be closed
        self._expects = "value"
        self._is_key = False
        self._word = ""  # of a string: an escape that is open; of a number or literal: all of it
        self.is_done = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def take(self, character: str) -> bool:
        """False when it cannot follow; nothing may follow then."""
        if self._expects == "text":
            return self._in_text(character)
        if self._expects == "word":
            if self._continues_word(character):
                return True
            if not self._is_whole_word():
                return False
            self._end_value()
        if character in " \t\n\r":
            return True
        return self._outside(character)

    def _outside(self, character: str) -> bool:
        expects, may_end = self._expects, self._expects.endswith("or end")
        if self._open and character == self._open[-1] and (may_end or expects == "comma"):
            self._open.pop()
            self._end_value()
            return True
        if expects in ("comma", "colon"):
            is_right = not self.is_done and character == (":" if expects == "colon" else ",")
            self._expects = "key" if expects == "comma" and self._open and self._open[-1] == "}" else "value"
            return is_right
        if expects.startswith("key"):
            self._expects, self._is_key = "text", True
            return character == '"'
        return self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._open.append("}" if character == "{" else "]")
            self._expects = "key or end" if character == "{" else "value or end"
        elif character == '"':
            self._expects, self._is_key = "text", False
        else:
            self._expects, self._word = "word", ""
            return self._continues_word(character)
        return True

    def _continues_word(self, character: str) -> bool:
        word = self._word + character
        if not self._NUMBER_BEGUN.fullmatch(word) and not any(one.startswith(word) for one in self._LITERALS):
            return False
        self._word = word
        return True

    def _is_whole_word(self) -> bool:
        return self._word in self._LITERALS or self._NUMBER.fullmatch(self._word) is not None

    def _in_text(self, character: str) -> bool:
        if self._word:
            self._word += character
            if len(self._word) == 2 and character != "u":
                self._word = ""
                return character in '"\\/bfnrt'
            is_right = len(self._word) == 2 or character in string.hexdigits
            self._word = "" if len(self._word) == 6 else self._word
            return is_right
        if character == '"':
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
        elif character == "\\":
            self._word = character
        return character >= " "

    def _end_value(self) -> None:
        self._word, self._expects = "", "comma"
        self.is_done = not self._open


# ---------------------------------------------------------------------- one call


@dataclass
class Call:
    index: int
    id: str
    name: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Begin: TypeAlias = Callable[[str], Call | None]
"""A call of the tool of that name; None if there is no such tool."""


class _Reading(ABC):
    """One call on its way, from behind the mark that opens it."""

    def __init__(self, before: str, begin: Begin) -> None:
        self.before = before  # what led here: blanks and marks
        self.raw = ""
        self.call: Call | None = None
        self.is_done = self.is_broken = False
        self._begin = begin
        self._json = JsonScanner()

    @abstractmethod
    def take(self, character: str) -> bool:
        """False when this is no call; then the character was not taken."""


class _ObjectReading(_Reading):
    """A call as one object: {"name": …, "arguments": {…}}."""

    def __init__(self, before: str, begin: Begin, key: str | None) -> None:
        """`key`: what arguments are called, in the usual order of keys; None: either name, in any order."""
        super().__init__(before, begin)
        self._key = key
        self._are_arguments_open = False

    def take(self, character: str) -> bool:
        if not (self._json.depth or character == "{" or character.isspace()) or not self._json.take(character):
            return False
        if self.call is None and character == "{" and self._json.depth == 2 and (head := HEAD.fullmatch(self.raw)):
            self.call = self._begin(head[1]) if self._key in (None, head[2]) else None
            self._are_arguments_open = self.call is not None
            if self.call is None:
                return False
        self.raw += character
        if self.call is not None and self._are_arguments_open:
            self.call.arguments += character
            self._are_arguments_open = self._json.depth > 1
        self.is_done = self._json.is_done
        if self.is_done and self.call is None and self._key is None:
            self._read_whole()
        return True

    def _read_whole(self) -> None:
        try:
            given: dict[str, Any] = json.loads(self.raw)
        except (ValueError, RecursionError):  # numbers of too many digits, too many brackets
            return
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, dict) and isinstance(given.get("name"), str):
            self.call = self._begin(given["name"])
        if self.call is not None:
            self.call.arguments = json.dumps(arguments, ensure_ascii=False)


class _NamedReading(_Reading):
    """A call as a name, a mark and arguments: name[ARGS]{…}."""

    def take(self, character: str) -> bool:
        if self.call is None:
            head = self.raw + character
            if head.endswith("[ARGS]"):
                name = NAMED_HEAD.fullmatch(head)
                self.call = None if name is None else self._begin(name[1])
            if self.call is None and (head.endswith("[ARGS]") or len(head) > MAX_HEAD):
                return False
        elif not (self._json.depth or character == "{" or character.isspace()) or not self._json.take(character):
            return False
        elif self._json.depth or self._json.is_done:
            self.call.arguments += character
        self.raw += character
        self.is_done = self._json.is_done
        return True


# ---------------------------------------------------------------------- an answer


@dataclass
class Found:
    """What a piece of an answer brought: text that is no call, and what is new of calls."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ToolParser(ABC):
    """One answer on its way. What is found does not depend on how the text is cut into pieces."""

    marker: ClassVar[str]
    """What comes before calls in the middle of an answer."""
    closing_marks: ClassVar[tuple[str, ...]] = ()
    """Further marks of the form, which may be control tokens too."""

    key: ClassVar[str] = "arguments"

    def __init__(self, names: Collection[str], *, is_exact: bool = False) -> None:
        """`is_exact`: calls in another spelling than the form's own are text."""
        self._names = names
        self._key = self.key if is_exact else None
        self._rest = ""  # not understood yet
        self._before = ""  # what led to a call
        self._said: list[str | _Reading] = []
        self._reading: _Reading | None = None
        self._num_begun = 0
        self.num_done = 0
        """Calls that are whole."""
        self._found = Found()
        self._step = self._in_text

    def push(self, text: str, *, is_end: bool = False) -> Found:
        self._rest += text
        self._found = Found()
        while self._step(is_end):
            pass
        return self._found

    def result(self, *, keeps_unfinished: bool) -> tuple[str, list[Call]]:
        """Text and calls of the whole answer. A call that was cut off is text unless `keeps_unfinished`."""
        text, calls = "", []
        for one in self._said:
            if isinstance(one, str):
                text += one
            elif one.call is not None and (one.is_done or (keeps_unfinished and not one.is_broken)):
                calls.append(one.call)
            else:
                text += one.before + one.raw
        return text, calls

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _begin(self, name: str) -> Call | None:
        if name not in self._names:
            return None
        call = Call(self._num_begun, self.new_id(), name)
        self._num_begun += 1
        self._found.calls.append({"index": call.index, **call.body()})
        return call

    # A step takes something of the rest or sets another step, and says whether there may be more to do.

    @abstractmethod
    def _opened(self, is_end: bool) -> bool:
        """Behind the mark: what kind of call begins."""

    @abstractmethod
    def _behind_call(self, is_end: bool) -> bool:
        """Another call, a mark that ends calls, or text."""

    def _in_text(self, is_end: bool) -> bool:
        at = self._rest.find(self.marker)
        if at >= 0:
            text = self._rest[:at].rstrip()
            self._before, self._rest = (
                self._rest[len(text) : at + len(self.marker)],
                self._rest[at + len(self.marker) :],
            )
            self._say(text)
            self._step = self._opened
            return True
        sure = self._rest if is_end else self._rest[: open_stop(self._rest, (self.marker,))]
        kept = sure if is_end and not self._num_begun else sure.rstrip()
        self._say(kept)
        self._rest = "" if is_end else self._rest[len(kept) :]
        return False

    def _read_object(self, before: str) -> bool:
        self._reading, self._step = _ObjectReading(before, self._begin, self._key), self._in_call
        return True

    def _in_call(self, is_end: bool) -> bool:
        reading = self._reading
        assert reading is not None
        known = 0 if reading.call is None else len(reading.call.arguments)
        num_taken = 0
        for character in self._rest:
            if not reading.take(character):
                reading.is_broken = True
                break
            num_taken += 1
            if reading.is_done:
                break
        self._rest = self._rest[num_taken:]
        self._hand_out(reading, known)
        if reading.is_done and reading.call is not None:
            self.num_done += 1
            self._step = self._behind_call
            return True
        if not (reading.is_done or reading.is_broken or is_end):
            return False
        if reading.call is None:
            self._say(reading.before + reading.raw)
        self._step = self._in_text
        return True

    def _hand_out(self, reading: _Reading, known: int) -> None:
        """What the arguments have got beyond the known ones."""
        if reading.call is None:
            return
        if self._said[-1:] != [reading]:
            self._said.append(reading)
        new, last = reading.call.arguments[known:], self._found.calls[-1] if self._found.calls else None
        if last is not None and last["index"] == reading.call.index:
            last["function"]["arguments"] += new
        elif new:
            self._found.calls.append({"index": reading.call.index, "function": {"arguments": new}})

    def _say(self, text: str) -> None:
        if text:
            self._found.text += text
            self._said.append(text)


class HermesParser(ToolParser):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes and Qwen write calls."""

    marker = "<tool_call>"
    closing_marks = ("</tool_call>",)

    def _opened(self, is_end: bool) -> bool:
        return self._read_object(self._before)

    def _behind_call(self, is_end: bool) -> bool:
        """The closing mark may be missing."""
        closing, text = self.closing_marks[0], self._rest.lstrip()
        if text.startswith(closing):
            self._rest = text[len(closing) :]
        elif closing.startswith(text) and not is_end:
            return False
        self._step = self._in_text
        return True


class Llama3Parser(ToolParser):
    """{"name": …, "parameters": {…}} at the beginning of an answer or behind <|python_tag|>; more behind semicolons."""

    marker = "<|python_tag|>"
    key = "parameters"

    def __init__(self, names: Collection[str], *, is_exact: bool = False) -> None:
        super().__init__(names, is_exact=is_exact)
        self._step = self._behind_call

    def _opened(self, is_end: bool) -> bool:
        return self._read_object(self._before)

    def _behind_call(self, is_end: bool) -> bool:
        blanks = " \t\r\n;" if self._num_begun else " \t\r\n"
        text = self._rest.lstrip(blanks)
        if not text and not is_end:
            return False
        if text.startswith("{"):
            before, self._rest = self._rest[: -len(text)], text
            return self._read_object(before)
        self._step = self._in_text
        return True


class MistralParser(ToolParser):
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} for each call."""

    marker = "[TOOL_CALLS]"
    closing_marks = ("[ARGS]", "[CALL_ID]")
    _is_in_list = False

    def new_id(self) -> str:
        """Templates of these models refuse others."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _opened(self, is_end: bool) -> bool:
        text = self._rest.lstrip()
        if not text and not is_end:
            return False
        self._is_in_list = text.startswith("[")
        if self._is_in_list:
            blanks, self._rest = self._rest[: -len(text)], text[1:]
            return self._read_object(f"{self._before}{blanks}[")
        if text.startswith("{"):
            return self._read_object(self._before)
        self._reading, self._step = _NamedReading(self._before, self._begin), self._in_call
        return True

    def _behind_call(self, is_end: bool) -> bool:
        text = self._rest.lstrip()
        if self._is_in_list and not text and not is_end:
            return False
        if self._is_in_list and text.startswith(","):
            self._rest = text[1:]
            return self._read_object(",")
        if self._is_in_list and text.startswith("]"):
            self._rest = text[1:]
        self._step = self._in_text
        return True


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
"""By the names that users give them."""
