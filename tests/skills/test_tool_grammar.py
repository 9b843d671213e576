"""Calls that are held to a grammar: whatever tokens are drawn from it, they are calls that fit their schemas."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from kestrel.constraints import ResponseFormat
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.errors import RequestError
from kestrel.models.tokenizer import TextTokenizer
from kestrel.request import TokenConstraint
from kestrel.skills.base import ToolForm
from kestrel.skills.states import TextStream
from kestrel.skills.tool_parsers import TOOL_PARSERS, Call, ToolParser
from kestrel.skills.tool_state import NamingTokenizer
from kestrel.skills.tools import ToolChoice, ToolUse, tools
from tests.constraints.json_walks import SCHEMAS, allowed_ids, assert_valid
from tests.llama.chat_shapes import byte_level, conversation, encoder, sentence_pieces, template_chat, text_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
PARAMETERS = {"greet": SCHEMAS["person"], "meet-2": SCHEMAS["nested"], "choose": SCHEMAS["optional fields"]}
HIDDEN, SHOWN, ABSENT = byte_level(MARKS), byte_level((), MARKS), byte_level()
PIECES = sentence_pieces(MARKS)
FORMS = [("hermes", False), ("llama3", False), ("mistral", False), ("mistral", True)]
KINDS = {"hidden": HIDDEN, "shown": SHOWN, "absent": ABSENT, "pieces": PIECES}
HOW = [(name, args, described) for name, args in FORMS for described in KINDS.values()]
EACH = pytest.mark.parametrize(
    ("name", "has_args_mark", "described"),
    HOW,
    ids=[f"{name}{args or ''}-{d}" for name, args in FORMS for d in KINDS],
)


def use(choice: ToolChoice, *, is_strict: bool = False, is_parallel: bool = True) -> ToolUse:
    given = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": is_strict}}
        for name, schema in PARAMETERS.items()
    ]
    return ToolUse(tools("tools", given), choice, is_parallel)


def form(name: str, has_args_mark: bool, described: str) -> ToolForm:
    ids = {mark: token_id for mark, token_id in encoder(described).controls.items() if mark in MARKS}
    return ToolForm(name, ids, has_args_mark=has_args_mark)


@cache
def compiler(described: str, end_id: int) -> ConstraintCompiler:
    return ConstraintCompiler(text_tokenizer(described).to_json, end_id, are_tried=False)


class Drawing:
    """Tokens drawn at random from what a constraint allows, and what a parser finds in them."""

    def __init__(
        self, form: ToolForm, described: str, wanted: ToolUse, otherwise: ResponseFormat | None = None
    ) -> None:
        self.described = described
        self.tokenizer: TextTokenizer = text_tokenizer(described)
        wanted_format = wanted.format(form, otherwise)
        assert wanted_format is not None
        self.end_id = encoder(described).controls["</s>"]
        self.constraint: TokenConstraint = compiler(described, self.end_id).start(wanted_format)
        self.parser: ToolParser = TOOL_PARSERS[form.name](wanted.names, is_exact=True)
        self._said = TextStream(NamingTokenizer(self.tokenizer, form.ids), by_words=False)

    def take(self, token_id: int) -> None:
        self.constraint.accept(token_id)
        self.parser.push(self._said.push(token_id))

    def say(self, text: str) -> None:
        for token_id in encoder(self.described).encode([text]):
            self.take(token_id)

    def spell(self, text: str) -> Drawing:
        """As `say`, without the blank that a vocabulary of sentence pieces puts before a text."""
        rest = text.encode()
        while rest:
            pieces = {one: self.tokenizer.token_bytes(one) for one in allowed_ids(self.constraint)}
            token_id = max(one for one, piece in pieces.items() if piece and rest.startswith(piece))
            self.take(token_id)
            rest = rest.removeprefix(pieces[token_id])
        return self

    def draw(self, seed: int) -> tuple[str, list[Call]]:
        """Until the end, or until there is a call where there need not be an end."""
        choose = random.Random(seed)
        for _ in range(600):
            token_id = choose.choice(allowed_ids(self.constraint))
            if token_id == self.end_id or (self.may_be_text and self.parser.num_done):
                self.parser.push("", is_end=True)
                return self.parser.result(keeps_unfinished=False)
            self.take(token_id)
        raise AssertionError("no end")

    may_be_text = False


@EACH
def test_whatever_is_drawn_is_calls_that_fit_their_schemas(name: str, has_args_mark: bool, described: str) -> None:
    numbers, named = set(), set()
    for seed in range(10):
        text, calls = Drawing(form(name, has_args_mark, described), described, use(ToolChoice("required"))).draw(seed)
        assert (text, bool(calls)) == ("", True)
        for call in calls:
            assert_valid(call.arguments, PARAMETERS[call.name])
        numbers.add(len(calls))
        named |= {call.name for call in calls}
    assert len(named) > 1
    assert (max(numbers) > 1) == (name != "llama3")


LISTED = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for message in messages if message.role != 'tool' %}
    {%- if message.tool_calls %}{{ '[TOOL_CALLS] [' + message.tool_calls[0].function | tojson + ']' + eos_token }}
    {%- else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("described", [HIDDEN, PIECES], ids=["byte-level", "pieces"])
@pytest.mark.parametrize("blank", [" ", ""])
def test_a_call_may_have_the_ids_that_the_template_gives_it(described: str, blank: str) -> None:
    """A vocabulary of sentence pieces has other ids for `[{` behind a blank, and the model knows only those."""
    chat = template_chat(LISTED.replace("] [", f"]{blank}["), described)
    assert chat.tools is not None
    call = {"id": "x", "type": "function", "function": {"name": "choose", "arguments": {"a": True}}}
    asked = {"role": "user", "content": "the cat"}
    written = chat.write(conversation([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])).parts
    ids = encoder(described).encode(written)
    ids = ids[ids.index(encoder(described).controls["[TOOL_CALLS]"]) :]
    for wanted in (use(ToolChoice("required")), use(ToolChoice(), is_strict=True)):
        drawing = Drawing(chat.tools, described, wanted)
        for token_id in ids[:-1]:
            assert token_id in allowed_ids(drawing.constraint)
            drawing.take(token_id)
        assert drawing.end_id == ids[-1] in allowed_ids(drawing.constraint)
        assert [found.arguments for found in drawing.parser.result(keeps_unfinished=False)[1]] == ['{"a": true}']


@EACH
def test_a_named_or_single_call_is_one(name: str, has_args_mark: bool, described: str) -> None:
    one = use(ToolChoice("required", "meet-2"))
    for wanted, choices in ((one, {"meet-2"}), (use(ToolChoice("required"), is_parallel=False), set(PARAMETERS))):
        for seed in range(3):
            text, (call,) = Drawing(form(name, has_args_mark, described), described, wanted).draw(seed)
            assert (text, call.name in choices) == ("", True)
            assert_valid(call.arguments, PARAMETERS[call.name])


@EACH
def test_a_strict_call_is_held_to_its_schema_once_it_has_begun(name: str, has_args_mark: bool, described: str) -> None:
    opening = {
        "hermes": "the mat <tool_call>",
        "llama3": '{"name":"greet","parameters": ',
        "mistral": "the mat[TOOL_CALLS]",
    }[name]
    for seed in range(6):
        drawing = Drawing(form(name, has_args_mark, described), described, use(ToolChoice(), is_strict=True))
        drawing.may_be_text = True
        said, mark, _ = opening.partition(drawing.parser.marker)
        drawing.say(said)
        if mark in encoder(described).controls and seed % 2:
            drawing.take(encoder(described).controls[mark])
        else:
            drawing.say(mark)
        _, (call,) = drawing.draw(seed)
        assert_valid(call.arguments, PARAMETERS[call.name])


def opened(drawing: Drawing, name: str) -> Drawing:
    """With the beginning of a call, if only its mark, as the form spells it."""
    begins = {"hermes": "<tool_call>", "llama3": '{"name": "greet", "parameters": ', "mistral": "[TOOL_CALLS]"}[name]
    controls = encoder(drawing.described).controls
    if begins in controls:
        drawing.take(controls[begins])
        return drawing
    return drawing.spell(begins)


@EACH
def test_beside_a_format_an_answer_is_calls_or_fits_the_format(name: str, has_args_mark: bool, described: str) -> None:
    """A schema with texts that begin as calls of Llama 3 do."""
    person = ResponseFormat("json_schema", json.dumps(SCHEMAS["person"]))
    number, anything = ResponseFormat("regex", "[0-9/]{3}"), ResponseFormat("regex", "(.|\\n)*")

    def drawing(otherwise: ResponseFormat) -> Drawing:
        return Drawing(form(name, has_args_mark, described), described, use(ToolChoice(), is_strict=True), otherwise)

    for seed, otherwise in enumerate((person, number, anything)):
        text, calls = opened(drawing(otherwise), name).draw(seed)
        assert (text, bool(calls)) == ("", True)
        for call in calls:
            assert_valid(call.arguments, PARAMETERS[call.name])
    text, calls = drawing(person).spell('{"name": "An').draw(0)
    assert not calls
    assert_valid(text, SCHEMAS["person"])
    begun = drawing(number).spell("1/2")
    assert allowed_ids(begun.constraint) == [begun.end_id]


@EACH
def test_text_stays_free_beside_strict_tools(name: str, has_args_mark: bool, described: str) -> None:
    drawing = Drawing(form(name, has_args_mark, described), described, use(ToolChoice(), is_strict=True))
    assert drawing.end_id in allowed_ids(drawing.constraint)
    text = 'the < cat [1] {"name": "Bob"}\n<tool_cal [TOOL é'
    drawing.say(text)
    assert drawing.end_id in allowed_ids(drawing.constraint)
    drawing.parser.push("", is_end=True)
    assert drawing.parser.result(keeps_unfinished=False) == (text, [])


def test_schemas_of_tools_are_bounded_as_formats_are() -> None:
    described, form = byte_level(), ToolForm("hermes", {})
    compiler = ConstraintCompiler(text_tokenizer(described).to_json, 257, are_tried=True)

    def start(schema: dict[str, Any]) -> None:
        given = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]
        wanted = ToolUse(tools("tools", given), ToolChoice("required")).format(form)
        assert wanted is not None
        compiler.start(wanted)

    try:
        start({"properties": {"a": {"type": "string"}}})
        for schema in (
            {"properties": {"a": {"multipleOf": 999983}}},
            {"properties": {"a": {"allOf": [{"pattern": f".*{one}.{{10}}"} for one in "abcdefghijklmnopqrst"]}}},
            {"properties": {"a": {"type": "frog"}}},
            {"properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]},
        ):
            with pytest.raises(RequestError) as refusal:
                start(schema)
            assert refusal.value.field.split(".")[0] == "tools"
    finally:
        compiler.close()


def test_properties_that_no_schema_names_cannot_come() -> None:
    (tool,) = tools("tools", [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}])
    assert tool.parameters == {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    (tool,) = tools("tools", [{"type": "function", "function": {"name": "f"}}])
    assert json.dumps(tool.parameters["properties"]) == "{}"
    assert tool.definition == {"type": "function", "function": {"name": "f"}}
    joined = {"type": "object", "allOf": [{"properties": {"b": {}}}], "properties": {"a": {}}}
    (tool,) = tools("tools", [{"type": "function", "function": {"name": "f", "parameters": joined}}])
    assert tool.parameters == joined
