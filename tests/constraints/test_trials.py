"""Formats are tried in a process that can be stopped: no cost of theirs reaches the one that serves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrel.constraints import compiler as compiling
from kestrel.constraints import trials as trying
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.constraints.formats import ResponseFormat
from kestrel.constraints.matchers import without_control_names
from kestrel.constraints.trials import MEMORY_BYTES, Trials
from kestrel.errors import CapacityError, RequestError
from tests.constraints.json_walks import EOS, SCHEMAS, allowed_ids, tokenizer, walk
from tests.cpu_time import least_cpu_s
from tests.processes import children, eventually, has_ended

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.4
GOOD = ResponseFormat("json_schema", json.dumps(SCHEMAS["person"]))


def vocabulary() -> str:
    return without_control_names(tokenizer().to_json())


def of_schema(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat("json_schema", json.dumps(schema))


ENDLESS = of_schema({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(24)]})
LARGE = of_schema(
    {
        "allOf": [
            {"properties": {"a": {"enum": [f"v{i}" for i in range(1800)]}}},
            {"anyOf": [{"type": "object"}] * 1500},
        ]
    }
)
DEEP = of_schema(
    {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"items": {"$ref": f"#/$defs/a{(i + 1)}"}} for i in range(4000)} | {"a4000": {}},
    }
)


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(vocabulary, EOS, computing_s=LIMIT_S)
    yield made
    made.close()


def test_a_format_passes_with_its_size_and_a_bad_one_with_its_reason(trials: Trials) -> None:
    assert 0 < trials.run(GOOD) < 2**20
    with pytest.raises(RequestError, match=r"^response_format: cannot be answered \(.*frog.*; simplify or correct it$"):
        trials.run(of_schema({"type": "frog"}))
    with pytest.raises(RequestError, match=r"^response_format: cannot be answered"):
        trials.run(ResponseFormat("regex", "("))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [(ENDLESS, "takes more than 0.4 s to compile"), (LARGE, "takes too much memory"), (DEEP, "takes ")],
    ids=["endless", "large", "deep"],
)
def test_what_costs_too_much_is_ended_and_others_go_on_meanwhile(
    trials: Trials, wanted: ResponseFormat, reason: str
) -> None:
    trials.run(GOOD)
    pid, errors = trials.pid, []

    def fail() -> None:
        with pytest.raises(RequestError) as refusal:
            trials.run(wanted)
        errors.append(str(refusal.value))

    failing = threading.Thread(target=fail)
    failing.start()
    trials.run(GOOD)
    failing.join(60)
    assert errors
    assert reason in errors[0]
    assert trials.pid == pid
    assert trials.run(GOOD)
    assert pid is not None
    assert eventually(lambda: not children(pid))


def test_the_process_is_small_and_knows_nothing_of_torch(trials: Trials) -> None:
    trials.run(GOOD)
    assert "torch" not in Path(f"/proc/{trials.pid}/maps").read_text()
    assert int(Path(f"/proc/{trials.pid}/status").read_text().split("VmRSS:")[1].split()[0]) < 120 * 1024


def test_when_the_process_was_killed_the_next_format_starts_another() -> None:
    trials = Trials(vocabulary, EOS)
    try:
        trials.run(GOOD)
        first = trials.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: has_ended(first))
        assert trials.run(GOOD)
        assert trials.pid != first
    finally:
        trials.close()


def test_closing_ends_a_trial_and_tells_who_waits_for_it() -> None:
    trials = Trials(vocabulary, EOS)
    trials.run(GOOD)
    pid = trials.pid
    assert pid is not None
    assert eventually(lambda: not children(pid))
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(CapacityError) as stopped:
            trials.run(ENDLESS)
        errors.append(stopped.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert eventually(lambda: bool(children(pid)))
    [trial] = children(pid)
    trials.close()
    waiting.join(60)
    assert errors
    assert eventually(lambda: has_ended(pid) and has_ended(trial))
    trials.close()


@pytest.mark.parametrize("program", ["false", "/no/such/program"])
def test_where_no_process_starts_formats_are_refused_and_not_compiled_here(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trying, "_python", lambda: program)
    trials = Trials(vocabulary, EOS)
    with pytest.raises(CapacityError, match=r"process .* compiles? formats"):
        trials.run(GOOD)


PROGRAM = """
import time
from tests.constraints.test_trials import ENDLESS, GOOD, Trials, children, vocabulary
trials = Trials(vocabulary, 0)
trials.run(GOOD)
while children(trials.pid):
    time.sleep(0.02)
print(trials.pid, flush=True)
trials.run(ENDLESS)
"""


def test_it_ends_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert eventually(lambda: bool(children(pid)))
            [trial] = children(pid)
        finally:
            parent.kill()
    assert eventually(lambda: has_ended(pid) and has_ended(trial))


# ---------------------------------------------------------------------- formats made to cost


def hostile(seed: int) -> ResponseFormat:
    """An expression or several for one value, whose costly part is often reached late."""
    choose = random.Random(seed)
    hidden = choose.choice(["", "y", "y{30}"])

    def part(depth: int) -> str:
        if not depth:
            return choose.choice(["a", ".", "[ab]", "[^b]", r"\w", r"\p{L}", "(a|b)"])
        inner = part(depth - 1)
        low = choose.randint(0, 30)
        return choose.choice(
            [
                f"{inner}.*",
                f"({inner}|{part(depth - 1)})*",
                f"({inner}){{{low},{low + choose.choice([0, 1, 30, 300])}}}",
                f"({inner}){{{low},}}{part(depth - 1)}",
                f"{inner}?{part(depth - 1)}?",
                f".*{inner}.{{{low}}}",
            ]
        )

    def pattern() -> str:
        costly = "".join(part(choose.randint(1, 3)) for _ in range(choose.randint(1, 4)))
        return f"^(x|{hidden}{costly})$" if hidden else costly

    if choose.random() < 0.2:
        return ResponseFormat("regex", pattern())
    string: dict[str, Any] = {"type": "string", "pattern": pattern()}
    number = choose.choice([1, 1, 2, 3, 5, 12])
    schema: dict[str, Any] = {"allOf": [string, *({**string, "pattern": pattern()} for _ in range(number - 1))]}
    where = choose.choice(["", "", "properties", "patternProperties"])
    if where:
        schema = {"type": "object", where: {"yy": schema, "b": string}}
    return of_schema(schema)


@pytest.mark.exhaustive
def test_no_hostile_format_costs_much_here_whether_it_is_refused_or_followed() -> None:
    """Judged by its text, tried, compiled and followed where it would be served."""
    compiler = ConstraintCompiler(tokenizer().to_json, EOS)
    num_followed = 0

    def follow(wanted: ResponseFormat) -> None:
        nonlocal num_followed
        with contextlib.suppress(RequestError):
            constraint = compiler.start(wanted)
            num_followed += 1
            for _ in range(60):
                allowed = allowed_ids(constraint)
                wish = [i for i in allowed if tokenizer_text(i)[:1] in ("y", "a", '"')]
                token_id = (wish or allowed)[-1]
                if token_id == EOS:
                    break
                constraint.accept(token_id)

    try:
        compiler.start(GOOD)
        usual, before = least_cpu_s(lambda: follow(of_schema(EVERY_DAY["patterns"])), tries=1), _peak_bytes()
        num_followed = 0
        for seed in range(100):
            assert least_cpu_s(lambda seed=seed: follow(hostile(seed)), tries=1) < 300 * usual, hostile(seed)
            assert _peak_bytes() - before < 2 * MEMORY_BYTES, hostile(seed)
        assert 10 < num_followed < 90
    finally:
        compiler.close()


TEXTS: dict[int, str] = {}


def tokenizer_text(token_id: int) -> str:
    if not TEXTS:
        text = tokenizer()
        TEXTS.update({i: text.decode([i]) for i in range(text.vocab_size)})
    return TEXTS[token_id]


def _peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


# ---------------------------------------------------------------------- formats of every day

DATE = {"type": "string", "pattern": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"}
EVERY_DAY: dict[str, dict[str, Any]] = {
    "a model of pydantic": {
        "$defs": {
            "Colour": {"enum": ["red", "green", "blue"], "title": "Colour", "type": "string"},
            "Part": {
                "properties": {
                    "name": {"title": "Name", "type": "string", "maxLength": 2000},
                    "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None},
                    "made": {"format": "date-time", "type": "string"},
                    "weight": {"exclusiveMinimum": 0, "type": "number", "multipleOf": 0.01},
                },
                "required": ["name", "weight"],
                "type": "object",
            },
        },
        "properties": {
            "id": {"format": "uuid", "type": "string"},
            "email": {"format": "email", "type": "string", "maxLength": 320},
            "site": {"format": "uri", "type": "string", "minLength": 1, "maxLength": 2083},
            "parts": {"items": {"$ref": "#/$defs/Part"}, "type": "array", "maxItems": 50},
            "multipleOf": {"type": "integer"},
        },
        "required": ["id", "parts"],
        "type": "object",
    },
    "patterns": {
        "type": "object",
        "properties": {
            "date": DATE,
            "phone": {"type": "string", "pattern": r"^\+?[0-9 ()-]{7,20}$", "maxLength": 20},
            "plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{1,2} [0-9]{1,4}$"},
            "email": {"type": "string", "pattern": r"^[\w.+-]+@[\w-]+\.[\w.-]+$", "format": "email", "minLength": 6},
            "address": {"type": "string", "pattern": r"^(\d{1,3}\.){3}\d{1,3}$"},
            "text": {"type": "string", "pattern": r"^[\s\S]{1,2000}$", "maxLength": 2000},
        },
        "additionalProperties": False,
    },
    "a base and its extension": {
        "allOf": [
            {"type": "object", "properties": {"at": DATE, "id": {"type": "string", "format": "uuid"}}},
            {"type": "object", "properties": {"at": {"type": "string", "maxLength": 10}, "note": {"type": "string"}}},
        ]
    },
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x-": {"type": "string"}, "^[0-9]{2,4}$": {"type": "number"}},
        "additionalProperties": False,
    },
    "a long choice": {"enum": [f"value number {i}" for i in range(1000)]},
    "a tree": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name", "children"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", EVERY_DAY)
def test_formats_of_every_day_are_taken(name: str, trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "Trials", lambda *_: trials)
    compiler = ConstraintCompiler(tokenizer().to_json, EOS)
    constraint = compiler.start(of_schema(EVERY_DAY[name]))
    walk(constraint, 3, most=100)
