"""How intricate a regular expression is, estimated from its text alone.

A matcher that has read some text stands at one or more places of the expression at once, and a place inside a counted
repetition counts once for every number it may have reached. How many places that can be decides what a step costs, and
where expressions are intersected the numbers multiply. The estimate errs upwards.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_PLAIN = re.compile(r"[^\\.^$*+?{}()|\[\]]+")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)?", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:P?<[^>]*>|[A-Za-z-]*:|<?[=!]|[A-Za-z-]+(?=\))))?")
_WITHOUT_LENGTH = frozenset("bBAzZ<>")


class Extent(NamedTuple):
    """Of one part of an expression."""

    least: int = 0
    """Characters of its shortest match."""
    most: float = 0
    """Of its longest."""
    at_once: float = 0
    """Places of it that a matcher can stand at together when it enters the part once."""
    places: float = 0
    """The same when it enters again and again: all of its places."""
    repeats: float = 1
    """The largest product of nested counts; * and + count once."""
    num_written: int = 0
    """Repetitions as they are written, the same in two places counted twice."""
    head: str = ""
    """The character that every match begins with, when the expression says so plainly."""
    is_word: bool = False
    """It matches one plain text and nothing else."""
    is_anchored: bool = False
    """It begins with ^."""


NOTHING = Extent()
_CHARACTER = Extent(least=1, most=1, at_once=1, places=1)
_START = Extent(is_anchored=True)


def _word(text: str) -> Extent:
    return Extent(len(text), len(text), 1, len(text), head=text[:1], is_word=True)


class _Group:
    """A group that is being read: alternatives that are complete, and the parts of the last one."""

    __slots__ = ("alternatives", "parts")

    def __init__(self) -> None:
        self.alternatives: list[Extent] = []
        self.parts: list[Extent] = []

    def next_alternative(self) -> None:
        self.alternatives.append(_in_sequence(self.parts))
        self.parts = []

    def close(self) -> Extent:
        self.next_alternative()
        return _either(self.alternatives)


def matched(pattern: str) -> Extent:
    """Of an expression that matches a whole text."""
    return _read(pattern).close()


def searched(pattern: str) -> Extent:
    """Of an expression that may match anywhere in a text, as the keyword `pattern` does."""
    top = _read(pattern)
    whole = top.close()
    if all(alternative.is_anchored for alternative in top.alternatives):
        return whole._replace(at_once=whole.at_once + 1)
    return whole._replace(at_once=whole.places + 2)


def _read(pattern: str) -> _Group:
    """The group that is the whole expression. What is no expression reads as one that is near it."""
    open_groups = [_Group()]
    at = 0
    while at < len(pattern):
        group = open_groups[-1]
        sign = pattern[at]
        if (count := _COUNT.match(pattern, at)) is not None:
            _repeat_last(group.parts, *_bounds(count))
            at = count.end()
        elif sign in "*+?":
            _repeat_last(group.parts, int(sign == "+"), 1 if sign == "?" else math.inf)
            at += 1
        elif sign == "(":
            open_groups.append(_Group())
            at = _end(_OPENING, pattern, at)
        elif sign == ")":
            if len(open_groups) > 1:
                open_groups.pop()
                open_groups[-1].parts.append(group.close())
            at += 1
        elif sign == "|":
            group.next_alternative()
            at += 1
        else:
            parts, at = _atoms(pattern, at)
            group.parts += parts
    while len(open_groups) > 1:
        closed = open_groups.pop().close()
        open_groups[-1].parts.append(closed)
    return open_groups[0]


def _atoms(pattern: str, at: int) -> tuple[list[Extent], int]:
    """What stands at a place that is no operator, and the place behind it."""
    sign = pattern[at]
    if (plain := _PLAIN.match(pattern, at)) is not None:
        text = plain[0]  # its last character is apart: a repetition behind it is of that one alone
        return [_word(text[:-1]), _word(text[-1])] if len(text) > 1 else [_word(text)], plain.end()
    if sign == "[":
        return [_CHARACTER], _after_class(pattern, at)
    if sign == "\\":
        end = _end(_ESCAPE, pattern, at)
        letter = pattern[at + 1 : at + 2]
        if letter in _WITHOUT_LENGTH:
            return [_START if letter == "A" else NOTHING], end
        return [_CHARACTER if letter.isalnum() else _word(letter or "\\")], end
    if sign in "^$":
        return [_START if sign == "^" else NOTHING], at + 1
    return [_CHARACTER if sign == "." else _word(sign)], at + 1


def _end(syntax: re.Pattern[str], pattern: str, at: int) -> int:
    found = syntax.match(pattern, at)
    return at + 1 if found is None else found.end()


def _after_class(pattern: str, at: int) -> int:
    """Behind the bracket that closes the class opened at `at`; a bracket right at its start is a member."""
    at += 1 + pattern.startswith("^", at + 1)
    at += pattern.startswith("]", at)
    while at < len(pattern) and pattern[at] != "]":
        at += 1 + (pattern[at] == "\\")
    return at + 1


def _bounds(count: re.Match[str]) -> tuple[int, float]:
    least = _number(count[1])
    if count[2] is None:
        return least, least
    return least, _number(count[3]) if count[3] else math.inf


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 9 else 10**9


def _repeat_last(parts: list[Extent], least: int, most: float) -> None:
    if parts:
        parts[-1] = _repeated(parts[-1], least, most)


def _repeated(part: Extent, least: int, most: float) -> Extent:
    """Counts are told apart only where the length of the part leaves open which one a matcher has reached."""
    counts = max(least, 1) if most == math.inf else max(most, 1)
    places = part.places * counts
    is_told_apart = most > 1 and part.least != part.most
    return Extent(
        least=part.least * least,
        most=part.most * most if part.most else 0,
        at_once=places if is_told_apart else part.at_once,
        places=places,
        repeats=part.repeats * counts,
        num_written=part.num_written + 1,
        head=part.head if least else "",
        is_anchored=part.is_anchored and least > 0,
    )


def _in_sequence(parts: list[Extent]) -> Extent:
    """A part is entered once for every length of what is before it; behind a fixed length nothing before it lasts."""
    if len(parts) == 1:
        return parts[0]
    least, most, here, at_once, places = 0, 0.0, 0.0, 0.0, 0.0
    for part in parts:
        spread = most - least
        here = part.at_once if not spread else here + min(part.places, part.at_once * (spread + 1))
        at_once = max(at_once, here)
        places += part.places
        least, most = least + part.least, most + part.most
    visible = [part for part in parts if part.most]
    return Extent(
        least=least,
        most=most,
        at_once=at_once,
        places=places,
        repeats=max((part.repeats for part in parts), default=1),
        num_written=sum(part.num_written for part in parts),
        head=visible[0].head if visible else "",
        is_word=bool(visible) and all(part.is_word for part in visible),
        is_anchored=bool(parts) and parts[0].is_anchored,
    )


def _either(alternatives: list[Extent]) -> Extent:
    """Of alternatives that begin with different characters one remains after the first; plain words share a tree."""
    if len(alternatives) == 1:
        return alternatives[0]
    begun_by: dict[str, float] = {}
    words = {one.head for one in alternatives if one.is_word}
    for one in alternatives:
        if not one.is_word:
            begun_by[one.head] = begun_by.get(one.head, 0) + one.at_once
    anywhere = begun_by.pop("", 0)
    by_head = [begun_by.get(head, 0) + (head in words) for head in {*begun_by, *words}]
    return Extent(
        least=min(one.least for one in alternatives),
        most=max(one.most for one in alternatives),
        at_once=anywhere + max(by_head, default=0),
        places=sum(one.places for one in alternatives),
        repeats=max(one.repeats for one in alternatives),
        num_written=sum(one.num_written for one in alternatives),
        is_anchored=all(one.is_anchored for one in alternatives),
    )
