"""How intricate an expression is said to be: never less than it is, and little for ordinary ones."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest

from kestrel.constraints.cost_limits import MAX_PLACES_MET
from kestrel.constraints.patterns import matched, searched

Expression = tuple[Any, ...]
"""("set", letters) · ("row", first, rest) · ("either", one, other) · ("count", one, least, most) · ("empty",)"""
EMPTY: Expression = ("empty",)
MANY = 10**6


@pytest.mark.parametrize(
    ("pattern", "at_once"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", 2),
        (r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{12}$", 2),
        ("^(red|green|grey|blue)$", 2),
        ("^[a-z ]{1,5000}$", 2),
        ("[A-Z]", 3),
        ("^.*a.{10}$", 13),
        (".*a.{10}", 14),
        ("^(.{0,9}x){0,9}$", 91),
        (r"^(?:a|\p{L}+\x{41})$", 4),
    ],
)
def test_places_of_a_pattern(pattern: str, at_once: int) -> None:
    assert searched(pattern).at_once == at_once


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\+?[0-9 ()-]{7,20}$",
        r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$",
        r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,3})+$",
        r"^(?:(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)$",
        r"^(https?://)?[\w.-]+(\.[a-z]{2,6})+(/[\w./?%&=-]*)?$",
        r"^([^\n]{1,80}\n){1,20}$",
        r"^(?=x)[A-Z]{2}\d{2}[A-Z0-9]{11,30}$",
    ],
)
def test_ordinary_patterns_leave_room_to_be_combined(pattern: str) -> None:
    assert searched(pattern).at_once * 50 < MAX_PLACES_MET


@pytest.mark.parametrize(
    "text", ["", "(", ")", "|", "[", "[^", "\\", "a{", "a{2,1}", "(?", "(?P<", "*", "{3}", "a**", "^$|"]
)
def test_what_is_no_expression_is_read_all_the_same(text: str) -> None:
    assert matched(text).at_once >= 0
    assert searched(text).at_once >= 0


@pytest.mark.parametrize("seed", range(300))
def test_a_matcher_never_stands_at_more_places_than_said(seed: int) -> None:
    """Against a matcher made of the expression's derivatives, on random expressions and texts."""
    choose = random.Random(seed)
    expression = _random(choose, 4)
    said = matched(_written(expression)).at_once
    for _ in range(4):
        standing = {expression}
        for _ in range(24):
            standing = {rest for one in standing for rest in _after(one, choose.choice("abc"))}
            assert len(standing - {EMPTY}) <= said + 1, _written(expression)


def _random(choose: random.Random, depth: int) -> Expression:
    kind = choose.choice(["set", "row", "row", "either", "count", "count"]) if depth else "set"
    if kind == "set":
        return "set", "".join(choose.sample("abc", choose.randint(1, 3)))
    inner = _random(choose, depth - 1)
    if kind == "count":
        least = choose.randint(0, 3)
        return kind, inner, least, choose.choice([MANY, least + choose.randint(0 if least else 1, 4)])
    return kind, inner, _random(choose, depth - 1)


def _written(one: Expression) -> str:
    match one:
        case ("set", letters):
            return f"[{letters}]"
        case ("row", first, rest):
            return _written(first) + _written(rest)
        case ("either", first, second):
            return f"({_written(first)}|{_written(second)})"
        case ("count", inner, least, most):
            return f"({_written(inner)}){{{least},{'' if most == MANY else most}}}"
    return ""


def _row(first: Expression, rest: Expression) -> Expression:
    if first == EMPTY:
        return rest
    return first if rest == EMPTY else ("row", first, rest)


def _can_be_empty(one: Expression) -> bool:
    match one:
        case ("row", first, rest):
            return _can_be_empty(first) and _can_be_empty(rest)
        case ("either", first, second):
            return _can_be_empty(first) or _can_be_empty(second)
        case ("count", inner, least, _):
            return least == 0 or _can_be_empty(inner)
    return one == EMPTY


@lru_cache(maxsize=100_000)
def _after(one: Expression, letter: str) -> frozenset[Expression]:
    """What may be left to match behind a letter."""
    match one:
        case ("set", letters):
            return frozenset([EMPTY] if letter in letters else [])
        case ("row", first, rest):
            found = frozenset(_row(left, rest) for left in _after(first, letter))
            return found | _after(rest, letter) if _can_be_empty(first) else found
        case ("either", first, second):
            return _after(first, letter) | _after(second, letter)
        case ("count", inner, least, most):
            fewer = 0 if _can_be_empty(inner) else max(least - 1, 0)
            left = EMPTY if most == 1 else ("count", inner, fewer, most if most == MANY else most - 1)
            return frozenset(_row(rest, left) for rest in _after(inner, letter))
    return frozenset()
