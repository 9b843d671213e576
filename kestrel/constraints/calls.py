"""Calls of tools as a format: names, and arguments that fit a schema, spelt as the model's form of calls wants it.

Written as a grammar of llguidance. Either the answer is calls and nothing else; or calls, or else a text of another
format; or it is free and a call that has begun is held to the schema of its tool: a lazy lexeme ends free text as soon
as a call's mark, or the beginning of a call that has no mark, is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from llguidance import LLMatcher

from kestrel.constraints.formats import ResponseFormat

FIELD = "tools"
ControlToken: TypeAlias = tuple[str, int]
"""Its text and its id."""
Marks: TypeAlias = tuple[str | ControlToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpelling:
    """What stands around names and arguments. Without `is_marked` the first mark may begin an ordinary text too."""

    first: Marks = ()
    """Once, before all calls."""
    opens: Marks
    between: Marks
    """The name and the arguments."""
    closes: Marks = ()
    separates: Marks | None = None
    """Two calls; None: there is only one."""
    last: Marks = ()
    is_marked: bool = True


def call_format(
    spelling: CallSpelling,
    schemas: Mapping[str, Any],
    *,
    is_free: bool = False,
    otherwise: ResponseFormat | None = None,
    thought: Sequence[int] = (),
) -> ResponseFormat:
    """Calls of tools by name, each with the schema of its arguments. `is_free`: among or instead of text. `otherwise`:
    or else what an answer without calls matches. Both behind a thought between these two ids, if there are such."""
    described = {"spelling": asdict(spelling), "schemas": schemas, "is_free": is_free, "thought": thought}
    return ResponseFormat("calls", json.dumps({**described, "otherwise": otherwise and asdict(otherwise)}), FIELD)


def schemas_in(wanted: ResponseFormat) -> dict[str, Any]:
    return json.loads(wanted.text)["schemas"]


def otherwise_in(wanted: ResponseFormat) -> ResponseFormat | None:
    otherwise = json.loads(wanted.text)["otherwise"]
    return otherwise and ResponseFormat(**otherwise)


def lark_of(wanted: ResponseFormat, json_options: Mapping[str, Any], is_special: Callable[[int], bool]) -> str:
    """`json_options`: how llguidance is to write JSON. `is_special`: which ids it takes for no text."""
    described = json.loads(wanted.text)
    spelling, schemas = CallSpelling(**described["spelling"]), described["schemas"]
    lines = ["%llguidance {}", r"TEXT: /(.|\n)*/"]
    for at, schema in enumerate(schemas.values()):
        lines.append(f"arguments_{at}: {_json_rule(schema, json_options)}")

    def written(marks: Iterable[str | ControlToken]) -> str:
        return " ".join(_written(mark, is_special) for mark in marks)

    bodies = (f"{json.dumps(name)} {written(spelling.between)} arguments_{at}" for at, name in enumerate(schemas))
    lines.append(f"call: ({' | '.join(bodies)}) {written(spelling.closes)}")
    trigger, *opening = (*spelling.first, *spelling.opens)
    more = "" if spelling.separates is None else f"({written(spelling.separates)} {written(spelling.opens)} call)*"
    only_calls = f"{written([trigger, *opening])} call {more} {written(spelling.last)}"
    around = [f"<[{token_id}]>" for token_id in described["thought"] if is_special(token_id)]
    thought = f"({' TEXT '.join(around)})?" if len(around) == 2 else ""
    otherwise = otherwise_in(wanted)
    if otherwise is not None:
        # A longer lexeme would hide what begins alike, so calls that only their names tell from JSON have its lexemes.
        is_apart = spelling.is_marked or otherwise.kind == "regex"
        split = f"({' | '.join(_as_json(spelling, schemas))}) {written(spelling.closes)}"
        lines += [f"calls: {only_calls if is_apart else split}", _text_rule(spelling, otherwise, json_options)]
        return "\n".join([*lines, f"start: {thought} (calls | otherwise)"])
    if not described["is_free"]:
        return "\n".join([*lines, f"start: {only_calls}"])
    if not spelling.is_marked:
        heads = _lazy_heads(spelling, list(schemas))
        calls = (f'head_{at} " "? arguments_{at} {written(spelling.closes)}' for at in range(len(schemas)))
        return "\n".join([*lines, *heads, f"start: {thought} ({' | '.join(calls)} | TEXT)"])
    mark, text = _written(trigger, is_special), trigger if isinstance(trigger, str) else trigger[0]
    lines.append(f"spelt[lazy]: TEXT {json.dumps(text)}")
    lines.append(f"trigger: spelt | TEXT {mark}" if mark.startswith("<") else "trigger: spelt")
    more = more if spelling.first else ""  # otherwise each call has the trigger
    lines.append(f"start: {thought} (trigger {written(opening)} call {more} {written(spelling.last)})* TEXT")
    return "\n".join(lines)


def _json_rule(schema: Mapping[str, Any], json_options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': json_options})}"


def _text_rule(spelling: CallSpelling, otherwise: ResponseFormat, json_options: Mapping[str, Any]) -> str:
    if otherwise.kind == "json_schema":
        return f"otherwise: {_json_rule(json.loads(otherwise.text), json_options)}"
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(otherwise.text))["grammars"]
    mark = (*spelling.first, *spelling.opens)[0]
    call = json.dumps(mark if isinstance(mark, str) else mark[0])
    return f"otherwise: OTHERWISE\nOTHERWISE: {grammar['lark_grammar'].removeprefix('start: ')} & ~({call} TEXT)"


def _as_json(spelling: CallSpelling, names: Iterable[str]) -> Iterator[str]:
    for at, name in enumerate(names):
        lexemes = re.findall(r'"[^"]*"|\S *', "".join(map(str, (*spelling.opens, name, *spelling.between))))
        yield f"{' '.join(map(json.dumps, lexemes))} arguments_{at}"


def _written(mark: str | ControlToken, is_special: Callable[[int], bool]) -> str:
    if isinstance(mark, str):
        return json.dumps(mark)
    text, token_id = mark
    return f"<[{token_id}]>" if is_special(token_id) else json.dumps(text)


def _lazy_heads(spelling: CallSpelling, names: Sequence[str]) -> Iterator[str]:
    """The beginnings of calls up to their arguments, whatever blanks are in them."""
    for at, name in enumerate(names):
        beginning = "".join(map(str, (*spelling.opens, name, *spelling.between)))
        signs = map(re.escape, re.findall(r'"[^"]*"|\S', beginning))
        pattern = r"\s*".join(("", *signs))
        yield f"head_{at}[lazy]: /{pattern}/"
