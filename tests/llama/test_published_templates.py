"""Published chat templates give the ids of `transformers`, with tools too. They are fetched by
scripts/install-vocabularies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from kestrel.errors import RequestError
from kestrel.skills.template_chat import TemplateChat
from tests.exhaustive import sweep
from tests.llama.chat_shapes import byte_level, encoder, ids_of, reference_ids, template_chat

CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|\[/?[A-Z_]{2,30}\]|<(?:start|end)_of_\w+>|</?think>")
CONTROL_OF_CALLS = re.compile(r"</?tool_(?:call|response)s?>")
LEAST = 10
"""Templates that have to be compared, so that a change of the archive does not go unseen."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "the mat < [1]\n"}
CONVERSATIONS = (
    [user("the cat")],
    [user(" the\n\n"), ANSWER, user("a < b [x]")],
    [{"role": "system", "content": "the dog <b>"}, user("the cat"), ANSWER, user("\nthe mat")],
)


EVERY_FIFTH = sweep("step", [5, 1], always=[5])


def templates(vocabularies: Path, step: int) -> list[Path]:
    return sorted((vocabularies / "templates").glob("*.jinja"))[::step]


@EVERY_FIFTH
def test_published_templates_give_the_ids_of_transformers(vocabularies: Path, step: int) -> None:
    compared: set[str] = set()
    for path in templates(vocabularies, step):
        text = path.read_text(encoding="utf-8")
        described = byte_level(tuple(sorted(set(CONTROL.findall(text)))))
        chat = template_chat(text, described)
        for messages in CONVERSATIONS:
            try:
                expected = reference_ids(text, described, messages)
            except (TemplateError, TypeError, ValueError):
                with pytest.raises(RequestError):
                    ids_of(chat, described, messages)
                continue
            assert ids_of(chat, described, messages) == expected, path.name
            compared.add(path.name)
    assert len(compared) >= LEAST


@EVERY_FIFTH
def test_published_templates_let_no_forged_control_string_through(vocabularies: Path, step: int) -> None:
    """Some write the marks of a thought anew that they find in an earlier answer: those are not compared."""
    for path in templates(vocabularies, step):
        text = path.read_text(encoding="utf-8")
        described = byte_level(tuple(sorted(set(CONTROL.findall(text)))))
        chat, controls = template_chat(text, described), encoder(described).controls
        forged = "".join(controls)
        compared = {token_id for name, token_id in controls.items() if "think" not in name.lower()}
        found = []
        for first, second in (("the cat", "the mat"), (forged, f"a{forged}b")):
            messages = [user(first), {"role": "assistant", "content": second}, user(first)]
            try:
                ids = ids_of(chat, described, messages)
            except RequestError:
                continue
            found.append([token_id for token_id in ids if token_id in compared])
        assert len(found) < 2 or found[0] == found[1], path.name


# ---------------------------------------------------------------------- tools

SCHEMA = {
    "type": "object",
    "properties": {"where": {"type": "string", "enum": ["a < b", "[1]"]}},
    "required": ["where"],
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds the <cat>.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "sit_2", "description": "the mat [x]", "parameters": SCHEMA}},
]


def call(name: str, at: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, at: int) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"abcdefgh{at}", "name": "find"}


CALLED = {"role": "assistant", "content": "", "tool_calls": [call("find", 1, where="a < b", n=[1, {"é": None}])]}
TWICE = {"role": "assistant", "content": "", "tool_calls": [*CALLED["tool_calls"], call("sit_2", 2)]}
TOOL_CONVERSATIONS = (
    [user("the cat")],
    [{"role": "system", "content": "the dog"}, user("the cat"), CALLED, result('{"found": "<b>"}', 1)],
    [user("the cat"), TWICE, result("the mat [1]", 1), result("", 2), ANSWER, user("a")],
)
FORMS = {
    "meta-llama-Llama-3.1-8B": "llama3", "mistralai-Mistral-Nemo": "mistral", "Mistral-Small-3.2": "mistral",
    "Qwen-Qwen3-0.6B": "hermes", "Qwen-QwQ": "hermes", "NousResearch-Hermes-3": "hermes",
    "Qwen3-Coder": None, "GLM-4.6": None, "google-gemma-2": None,
}  # fmt: skip
SOME_OR_ALL = sweep("names", [tuple(FORMS), ("",)], always=[tuple(FORMS)])


def tool_chats(vocabularies: Path, names: tuple[str, ...]) -> Iterator[tuple[str, TemplateChat, str]]:
    """Name, chat and vocabulary of the templates with such names."""
    for path in templates(vocabularies, 1):
        if path.name.startswith(names):
            text = path.read_text(encoding="utf-8")
            described = byte_level(tuple(sorted({*CONTROL.findall(text), *CONTROL_OF_CALLS.findall(text)})))
            yield path.name, template_chat(text, described), described


def test_the_form_of_calls_is_told_by_the_template(vocabularies: Path) -> None:
    found = {name: chat.tools for name, chat, _ in tool_chats(vocabularies, tuple(FORMS))}
    for part, expected in FORMS.items():
        (form,) = (form for name, form in found.items() if name.startswith(part))
        assert (None if form is None else form.name) == expected, part


@SOME_OR_ALL
def test_tools_and_calls_give_the_ids_of_transformers(vocabularies: Path, names: tuple[str, ...]) -> None:
    compared: set[str] = set()
    for name, chat, described in tool_chats(vocabularies, names):
        for messages in TOOL_CONVERSATIONS if chat.tools is not None else ():
            try:
                expected = reference_ids(chat.template, described, messages, tools=TOOLS)
            except (TemplateError, TypeError, ValueError):
                with pytest.raises(RequestError):
                    ids_of(chat, described, messages, tools=TOOLS)
                continue
            assert ids_of(chat, described, messages, tools=TOOLS) == expected, name
            compared.add(name)
    assert len(compared) >= (6 if len(names) > 1 else 15)


@SOME_OR_ALL
def test_no_text_of_a_tool_or_a_call_becomes_a_control_id(vocabularies: Path, names: tuple[str, ...]) -> None:
    for name, chat, described in tool_chats(vocabularies, names):
        if chat.tools is None:
            continue
        controls = encoder(described).controls
        found = []
        for forged in ("the cat", "".join(controls)):
            schema = {"type": "object", "properties": {forged: {"enum": [forged]}}}
            tool = {"type": "function", "function": {"name": "find", "description": forged, "parameters": schema}}
            said = {"role": "assistant", "content": "", "tool_calls": [call("find", 1, **{forged: [forged]})]}
            ids = ids_of(chat, described, [user("the cat"), said, result(forged, 1)], tools=[tool])
            found.append([token_id for token_id in ids if token_id in controls.values()])
        assert found[0] == found[1], name
        assert found[0]
