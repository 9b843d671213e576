"""Compiled formats: every answer they allow is valid, hostile ones end, the kept ones are shared safely."""

from __future__ import annotations

import itertools
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kestrel.constraints import compiler as compiling
from kestrel.constraints import matchers
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.constraints.formats import ResponseFormat, response_format
from kestrel.errors import RequestError
from kestrel.request import TokenConstraint
from tests.constraints.json_walks import EOS, SCHEMAS, allowed_ids, assert_valid, compiler, tokenizer, walk
from tests.cpu_time import least_cpu_s
from tests.llama.chat_shapes import byte_level, encoder, text_tokenizer


def wanted(schema: dict[str, Any]) -> ResponseFormat:
    read = response_format("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert read is not None
    return read


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_random_answer_is_valid(name: str) -> None:
    compiled, text = compiler(), tokenizer()
    answers = set()
    for seed in range(40):
        ids = walk(compiled.start(wanted(SCHEMAS[name])), seed)
        assert ids is not None, "no end"
        answer = text.decode(ids)
        assert_valid(answer, SCHEMAS[name])
        answers.add(answer)
    assert len(answers) > 3


def test_an_expression_is_matched_whole() -> None:
    compiled, text = compiler(), tokenizer()
    for seed in range(20):
        ids = walk(compiled.start(ResponseFormat("regex", "[0-9]{1,3} (cat|dog)s?")), seed)
        assert ids is not None
        assert re.fullmatch("[0-9]{1,3} (cat|dog)s?", text.decode(ids))


def test_choices_come_out_letter_by_letter() -> None:
    choices = ["a.b", "c|d", r"[e] {f} \g", "^h$ #~&-/", "日本 é"]
    read = response_format("response_format", {"type": "choice", "choices": choices})
    assert read is not None
    compiled, text = compiler(), tokenizer()
    found = {text.decode(walk(compiled.start(read), seed) or []) for seed in range(60)}
    assert found == set(choices)


def test_the_end_is_barred_before_the_answer_is_whole_and_forced_after() -> None:
    constraint = compiler().start(ResponseFormat("regex", "yes"))
    assert EOS not in allowed_ids(constraint)
    for token_id in tokenizer().encode("yes"):
        constraint.accept(token_id)
    assert allowed_ids(constraint) == [EOS]


def test_free_text_allows_no_control_id_but_the_end() -> None:
    constraint = compiler().start(ResponseFormat("regex", "(?s:.*)"))
    assert set(allowed_ids(constraint)) & tokenizer().special_ids == {EOS}


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|md_reserved_2|>"])
def test_the_name_of_a_control_token_is_plain_text(name: str) -> None:
    text = tokenizer()
    for schema in ({"const": f"a {name} b"}, {"enum": [name, "other"]}):
        for seed in range(4):
            ids = walk(compiler().start(wanted(schema)), seed)
            assert ids is not None
            assert not set(ids) & text.special_ids
            assert_valid(text.decode(ids), schema)


@pytest.mark.parametrize("is_marked", [True, False])
def test_names_like_markup_are_plain_text_however_a_file_marks_them(is_marked: bool) -> None:
    """Published files do not mark `<think>` as special."""
    names = ("<think>", "</tool_call>", "[ARGS]")
    described = byte_level(names) if is_marked else byte_level((), names)
    text, end_id = text_tokenizer(described), encoder(described).controls["</s>"]
    constraint = ConstraintCompiler(text.to_json, end_id, are_tried=False).start(wanted({"const": "".join(names)}))
    ids: list[int] = []
    while (token_id := allowed_ids(constraint)[0]) != end_id:
        constraint.accept(token_id)
        ids.append(token_id)
    assert text.decode(ids) == '"<think></tool_call>[ARGS]"'
    assert not set(ids) & set(encoder(described).controls.values())


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 999}, 3),
        ({"type": "integer", "minimum": -50, "maximum": 999_999}, 6),
        ({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01}, 4),
        ({"type": "integer"}, None),
        ({"type": "number", "minimum": 0, "maximum": 1}, None),
    ],
)
def test_bounds_end_the_digits_of_a_number_and_nothing_else_does(schema: dict[str, Any], longest: int | None) -> None:
    """What the documents tell users whose model writes digits for ever."""
    constraint, text = compiler().start(wanted(schema)), tokenizer()
    written = ""
    while len(written) < 50:
        by_text = {text.decode([i]): i for i in allowed_ids(constraint) if i != EOS}
        wish = next((sign for sign in (".", *"1234567890") if sign in by_text), None)
        if wish is None:
            break
        constraint.accept(by_text[wish])
        written += wish
    assert len(written) == (longest or 50)


def test_an_id_that_was_not_allowed_fails_the_answer() -> None:
    constraint = compiler().start(ResponseFormat("regex", "yes"))
    with pytest.raises(RequestError, match="response_format"):
        constraint.accept(tokenizer().encode("z")[0])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "frog"},
        {"enum": []},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"$ref": "https://example.com/other.json"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"], "additionalProperties": False},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        {"type": "string", "maxLength": 10**18},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "object", "properties": {"a": {"type": "\ud800"}}},
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_what_cannot_be_kept_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^response_format: .*; (correct it|simplify or correct it)$") as refusal:
        compiler().start(wanted(schema))
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"v{i}" for i in range(4000)]},
        {"enum": ["a" * i for i in range(1, 300)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
        {"type": "array", "prefixItems": [{"enum": ["a", "b"]}] * 1000},
        {"type": "string", "pattern": "^(a+)+$"},
        {"type": "string", "pattern": "^((a|a)*)*b$"},
        {"type": "string", "pattern": "^.*a.{1000}$"},
        {"type": "string", "pattern": "^(.{0,90}x){0,90}.*y.{200}$"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
        {"type": "integer", "multipleOf": 9973},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "string"}]},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_hostile_formats_cost_a_bounded_time(schema: dict[str, Any]) -> None:
    """Refused, ended by a limit, or merely long: in no case does one of them hold a thread for long."""
    usual = least_cpu_s(lambda: _slowest_step(SCHEMAS["person"]))
    slowest: list[float] = []
    assert least_cpu_s(lambda: slowest.append(_slowest_step(schema)), tries=1) < 300 * usual
    assert slowest[0] < 20 * usual


def _slowest_step(schema: dict[str, Any]) -> float:
    """Of an answer in a format that is compiled for it; none where it is refused."""
    slowest = 0.0
    try:
        constraint = compiler().start(wanted(schema))
    except RequestError:
        return slowest
    for _ in range(60):
        token_id = allowed_ids(constraint)[-1]
        if token_id == EOS:
            break
        before = time.thread_time()
        constraint.accept(token_id)
        slowest = max(slowest, time.thread_time() - before)
    return slowest


def test_the_least_recently_used_format_is_forgotten() -> None:
    compiled = compiler(capacity=2)
    formats = [ResponseFormat("regex", pattern) for pattern in ("a", "b", "a", "c")]
    for one in formats:
        compiled.start(one)
    assert compiled.num_kept == 2
    assert [compiled.is_kept(ResponseFormat("regex", pattern)) for pattern in "abc"] == [True, False, True]


def test_answers_to_one_format_do_not_disturb_each_other() -> None:
    compiled = compiler()
    one, other = (compiled.start(wanted(SCHEMAS["person"])) for _ in range(2))
    first = one.allowed
    for token_id in tokenizer().encode('{"name": "'):
        one.accept(token_id)
    assert other.allowed == first != one.allowed
    assert walk(other, 1) is not None


def test_many_threads_share_one_compiler() -> None:
    compiled, text = compiler(), tokenizer()
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for name, schema in SCHEMAS.items():
                ids = walk(compiled.start(wanted(schema)), seed)
                assert ids is not None, name
                assert_valid(text.decode(ids), schema)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert compiled.num_kept == len(SCHEMAS)


def test_nothing_is_built_before_it_is_needed() -> None:
    def fail() -> str:
        raise AssertionError("built too early")

    ConstraintCompiler(fail, EOS)


def test_what_is_kept_is_bounded_by_its_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CAPACITY_BYTES", 25)
    compiled = compiler()
    monkeypatch.setattr(compiled, "_trials", SimpleNamespace(run=lambda wanted: 10 * len(wanted.text)))
    for pattern in ("a", "b", "c", "a"):
        compiled.start(ResponseFormat("regex", pattern))
    assert [compiled.is_kept(ResponseFormat("regex", pattern)) for pattern in "abc"] == [True, False, True]
    compiled.start(ResponseFormat("regex", "more than all"))
    assert compiled.is_kept(ResponseFormat("regex", "more than all"))
    assert compiled.num_kept == 1


def test_an_answer_that_takes_too_much_computing_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler()
    [letter] = tokenizer().encode("a")
    cheap, costly = (compiled.start(ResponseFormat("regex", "[a-z]{0,3000}")) for _ in range(2))
    _follow(cheap, letter, 200)
    clock = itertools.count(0.0, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(matchers.time, "thread_time", lambda: next(clock))
        with pytest.raises(RequestError, match=r"^response_format: took more than 2 s of computing"):
            _follow(costly, letter, 10)
    assert next(clock) == 5.0, "it ends with the fifth token of half a second each"
    _follow(cheap, letter, 200)


def _follow(constraint: TokenConstraint, token_id: int, number: int) -> None:
    for _ in range(number):
        constraint.accept(token_id)


def test_asking_whether_a_format_is_kept_does_not_wait_for_the_vocabulary() -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    def slowly() -> str:
        is_reading.set()
        may_go_on.wait(60)
        return tokenizer().to_json()

    compiled = ConstraintCompiler(slowly, EOS, are_tried=False)
    reading = threading.Thread(target=compiled.prepare)
    reading.start()
    try:
        assert is_reading.wait(60)
        asking = threading.Thread(target=compiled.is_kept, args=(ResponseFormat("regex", "a"),))
        asking.start()
        asking.join(50)
        assert not asking.is_alive()
    finally:
        may_go_on.set()
        reading.join()
