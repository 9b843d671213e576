"""Calls in the text of an answer: each form, whole and cut at every character, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from kestrel import config
from kestrel.skills.tool_parsers import TOOL_PARSERS, JsonScanner, ToolParser
from tests.exhaustive import given_examples

NAMES = ("find", "look_up-2")
ARGUMENTS = '{"where": "the \\"<tool_call>\\" [TOOL_CALLS] {mat}", "n": [1, -2.5e3, true, null, {}], "é": "日"}'
OTHER = '{"a":{"b":[]}}'
FIND, LOOK_UP = ("find", ARGUMENTS), ("look_up-2", OTHER)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", hermes(*FIND), "", [FIND]),
    ("hermes", f"I look.\n\n{hermes(*FIND)}\n{hermes(*LOOK_UP)}\n", "I look.", [FIND, LOOK_UP]),
    ("hermes", f"{hermes(*FIND)} and\n", " and", [FIND]),
    ("hermes", hermes(*FIND).removesuffix("</tool_call>"), "", [FIND]),
    ("hermes", '<tool_call>{"arguments": {"a":1}, "name": "find"}</tool_call>', "", [("find", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}, "id": 5}</tool_call>', "", [("find", "{}")]),
    ("hermes", '<tool_call>{"name": "find"}</tool_call>', "", [("find", "{}")]),
    ("hermes", f"<tool_call>\n{hermes(*FIND)}", "<tool_call>\n", [FIND]),
    ("hermes", "the < <tool <tool_cal> mat ", "the < <tool <tool_cal> mat ", []),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', None, []),
    ("hermes", "a\n<tool_call>\nfind the mat\n</tool_call>", None, []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', None, []),
    ("hermes", '<tool_call>{"name": "find", "arg', None, []),
    ("hermes", "<tool_call>", None, []),
    ("llama3", llama3(*FIND), "", [FIND]),
    ("llama3", f"\n<|python_tag|>{llama3(*FIND)}; {llama3(*LOOK_UP)}", "", [FIND, LOOK_UP]),
    ("llama3", f"{llama3(*FIND)}\n", "", [FIND]),
    ("llama3", f"I say: {llama3(*FIND)}", None, []),
    ("llama3", '{"name": "Bob", "parameters": {"age": 5}}', None, []),
    ("llama3", '{"age": 5} is JSON', None, []),
    ("llama3", "<|python_tag|>print(5)", None, []),
    ("llama3", " \n", None, []),
    ("mistral", f"[TOOL_CALLS] [{mistral(*FIND)}]", "", [FIND]),
    ("mistral", f"Yes. [TOOL_CALLS][{mistral(*FIND)}, {mistral(*LOOK_UP)}]", "Yes.", [FIND, LOOK_UP]),
    ("mistral", f"[TOOL_CALLS]find[ARGS]{ARGUMENTS}", "", [FIND]),
    ("mistral", f"[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}[TOOL_CALLS]look_up-2[ARGS] {OTHER}", "",
     [FIND, LOOK_UP]),
    ("mistral", "[TOOL_CALLS] the mat", None, []),
    ("mistral", "[TOOL_CALLS]fly[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS][5]", None, []),
    ("mistral", f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}", None, []),
    ("mistral", "a [1] [TOOL_CALL]", None, []),
]  # fmt: skip
"""Form, answer, the text that is left (None: all of it), names and arguments of calls."""


class Heard:
    """What a client of a stream has put together."""

    def __init__(self, parser: ToolParser) -> None:
        self.parser = parser
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.num_pieces = 0

    def say(self, text: str, *, is_end: bool = False) -> None:
        found = self.parser.push(text, is_end=is_end)
        self.text += found.text
        for piece in found.calls:
            self.num_pieces += 1
            if piece["index"] == len(self.calls):
                self.calls.append({**piece, "function": dict(piece["function"])})
                assert (piece["type"], bool(piece["id"]), bool(piece["function"]["name"])) == ("function", True, True)
            else:
                assert piece.keys() == {"index", "function"}
                self.calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]

    def functions(self) -> list[tuple[str, str]]:
        return [(call["function"]["name"], call["function"]["arguments"]) for call in self.calls]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_calls_are_found_however_the_answer_is_cut(
    form: str, answer: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    cuts = [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))]
    for pieces in cuts:
        heard = Heard(TOOL_PARSERS[form](NAMES))
        for piece in pieces:
            heard.say(piece)
        heard.say("", is_end=True)
        assert (heard.text, heard.functions()) == (answer if text is None else text, calls), pieces
        left, found = heard.parser.result(keeps_unfinished=False)
        assert (left, [(call.name, call.arguments) for call in found]) == (heard.text, calls)
        assert heard.parser.num_done == len(calls)
        assert [call.id for call in found] == [call["id"] for call in heard.calls]


SCRAPS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "find", ',
    '"arguments": ', '"parameters": ', '{"a": 1}', "{}", "{", "}", "[", "]", ", ", ";", "find", "\n", " ", "mat", '"',
)  # fmt: skip


@given_examples(100, 5000, st.sampled_from(list(TOOL_PARSERS)), st.lists(st.sampled_from(SCRAPS), max_size=14))
def test_no_scraps_of_calls_are_lost_and_no_cut_changes_what_is_found(form: str, scraps: list[str]) -> None:
    answer = "".join(scraps)
    found = []
    for pieces in ([answer], list(answer), scraps):
        heard = Heard(TOOL_PARSERS[form](NAMES))
        for piece in pieces:
            heard.say(piece)
        heard.say("", is_end=True)
        text, calls = heard.parser.result(keeps_unfinished=False)
        found.append((text, [(call.name, call.arguments) for call in calls], heard.text, heard.functions()))
        assert all(json.loads(call.arguments) is not None for call in calls)
    assert found[0] == found[1] == found[2]
    if not found[0][1]:
        assert found[0][0].split() == answer.split()


def test_arguments_come_as_they_are_written() -> None:
    for form, answer in (
        ("hermes", hermes(*FIND)),
        ("llama3", llama3(*FIND)),
        ("mistral", f"[TOOL_CALLS][{mistral(*FIND)}"),
        ("mistral", f"[TOOL_CALLS]find[ARGS]{ARGUMENTS}"),
    ):
        heard = Heard(TOOL_PARSERS[form](NAMES))
        begins = answer.index(ARGUMENTS)
        for at, character in enumerate(answer):
            heard.say(character)
            written = answer[begins : at + 1][: len(ARGUMENTS)]
            assert heard.functions() == (
                [("find", written)] if at >= begins - (form == "mistral") and heard.calls else []
            )
        assert heard.num_pieces >= len(ARGUMENTS)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1, b}} c'),
        ("llama3", '{"name": "find", "parameters": {"a": 01}} c'),
        ("mistral", 'a[TOOL_CALLS]find[ARGS]{"a" 1} c'),
    ],
)
def test_a_call_that_breaks_is_text_and_nothing_of_it_is_lost_in_a_stream(form: str, answer: str) -> None:
    heard = Heard(TOOL_PARSERS[form](NAMES))
    for character in answer:
        heard.say(character)
    heard.say("", is_end=True)
    assert heard.parser.result(keeps_unfinished=True) == (answer, [])
    assert len(heard.calls) == 1
    rest = answer[len(answer) - len(heard.text.removeprefix("a")) :]
    assert heard.text.endswith(rest)
    assert heard.functions()[0][1] + rest == answer[answer.index(heard.functions()[0][1]) :]


def test_a_call_that_was_cut_off_is_kept_only_where_a_limit_cut_it() -> None:
    answer = hermes(*FIND)[:-40]
    parser = TOOL_PARSERS["hermes"](NAMES)
    parser.push(answer)
    parser.push("", is_end=True)
    assert parser.result(keeps_unfinished=False) == (answer, [])
    text, (call,) = parser.result(keeps_unfinished=True)
    assert (text, call.name) == ("", "find")
    assert ARGUMENTS.startswith(call.arguments)
    assert parser.num_done == 0


def test_ids_of_calls_are_their_own_and_such_as_templates_take() -> None:
    ids = [TOOL_PARSERS[form](NAMES).new_id() for form in TOOL_PARSERS for _ in range(50)]
    assert len(set(ids)) == 150
    assert all(len(one) == 9 and one.isalnum() for one in ids[100:])
    assert tuple(TOOL_PARSERS) == config.TOOL_PARSERS


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scanned(text: str) -> int | None:
    """How many characters were taken until a value was whole; None if one could not follow."""
    scanner = JsonScanner()
    for at, character in enumerate(text):
        if not scanner.take(character):
            return None
        if scanner.is_done and scanner.depth == 0 and text[0] in '{["':
            return at + 1
    return len(text)


@given_examples(60, 2000, json_values, st.booleans(), st.sampled_from([None, 1]))
def test_values_of_json_are_taken_to_their_end(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps({"a": value}, ensure_ascii=is_ascii, indent=indent)
    assert scanned(f"{text} rest") == len(text)


def test_numbers_of_other_scripts_are_no_json() -> None:
    assert scanned("[-1\u1a90]") is None
    assert scanned("[1.5]") == 5


@given_examples(60, 2000, json_values, st.integers(0, 200), st.characters())
def test_what_is_taken_whole_is_json(value: Any, place: int, character: str) -> None:
    text = json.dumps([value])
    at = place % len(text)
    changed = text[:at] + character + text[at + 1 :]
    taken = scanned(changed)
    if taken is not None and changed[:1] in "{[":
        scanner = JsonScanner()
        is_whole = [scanner.take(one) and scanner.is_done for one in changed[:taken]][-1]
        if is_whole:
            json.loads(changed[:taken])
    else:
        with pytest.raises(ValueError):  # noqa: PT011 - json's own, or a lone surrogate
            json.loads(changed if changed[:1] in "{[" else "")
