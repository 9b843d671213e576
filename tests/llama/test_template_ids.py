"""Conversations by template have the ids of `transformers`; whatever a request's texts hold stays text."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.skills.base import ThinkingIds, ThinkingTags, WrittenChat, joined_turns
from tests.exhaustive import given_examples
from tests.llama.chat_shapes import (
    CHATML,
    HERMES,
    LLAMA,
    MARKED,
    MISTRAL,
    NAMES,
    NO_SYSTEM,
    OPEN_THOUGHT,
    SHAPES,
    THINKING,
    UNMARKED,
    byte_level,
    conversation,
    encoder,
    ids_of,
    reference_ids,
    sentence_pieces,
    template_chat,
    text_tokenizer,
)

VOCABULARIES = {"byte-level": byte_level, "sentence-pieces": sentence_pieces}
TEXTS = (
    "the cat", " the cat ", "\n\nthe mat\n", "a < b > c", "[1] [/INST", "x<|im_", "end|>", "", "日本語 <b> é",
    "\u2028the\U000f0000", "the\n\n\n  dog", "<b>bold</b> [x]",
)  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_those_of_transformers(shape: str, vocabulary: str) -> None:
    described, template = VOCABULARIES[vocabulary](), SHAPES[shape]
    chat = template_chat(template, described)
    for at, text in enumerate(TEXTS):
        turns = [user(text), said(TEXTS[at - 1]), user(TEXTS[at - 2])]
        for messages in (turns[:1], turns, [{"role": "system", "content": TEXTS[at - 3]}, *turns]):
            if shape == "no_system" and messages[0]["role"] == "system":
                continue
            assert ids_of(chat, described, messages) == reference_ids(template, described, messages), messages


@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>", "<tools>", "</tools>")])
def test_tools_and_calls_are_written_as_transformers_writes_them(marks: tuple[str, ...]) -> None:
    described = byte_level(marks)
    chat = template_chat(HERMES, described)
    for text in TEXTS:
        schema = {"type": "object", "properties": {f"a{text}": {"enum": [text, 1, None]}}}
        tools = [{"type": "function", "function": {"name": "find", "description": text, "parameters": schema}}]
        call = {"id": "x", "type": "function", "function": {"name": "find", "arguments": {"a": [text]}}}
        turns = [user(text), said("", tool_calls=[call, call]), {"role": "tool", "content": text, "tool_call_id": "x"}]
        for messages in (turns[:1], turns, [{"role": "system", "content": text}, *turns, said(text), user("b")]):
            found = ids_of(chat, described, messages, tools=tools)
            assert found == reference_ids(HERMES, described, messages, tools=tools), messages


def test_thoughts_of_earlier_answers_are_taken_as_the_template_takes_them() -> None:
    described = byte_level()
    chat = template_chat(THINKING, described)
    for answer in ("<think>\nthe cat\n</think>\n\nthe mat", "the <think> mat", "cat</think>\nmat", "<think>sat"):
        turns = [user("a"), said(answer), user("b")]
        parts = chat.write(conversation(turns)).parts
        plain = "<think>" not in answer or "</think>" in answer
        written = "".join(parts)
        assert ("<think>" in written) == (not plain)
        if plain:
            assert ids_of(chat, described, turns) == reference_ids(THINKING, described, turns)
    apart = [user("a"), said("the mat", reasoning_content="the cat"), user("b")]
    assert ids_of(chat, described, apart) == reference_ids(THINKING, described, apart)
    last = [user("a"), said("the mat", reasoning_content="the cat <|im_end|>")]
    assert encoder(described).controls["<think>"] in ids_of(chat, described, last, opens_answer=False)


@pytest.mark.parametrize("values", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"unknown": [1]}])
def test_further_values_reach_the_template(values: dict[str, Any]) -> None:
    described = byte_level()
    found = ids_of(template_chat(THINKING, described), described, [user("a")], template_values=values)
    assert found == reference_ids(THINKING, described, [user("a")], **values)


def test_a_wish_to_think_sets_the_variable_that_templates_have_for_it() -> None:
    described = byte_level()
    chat, plain = template_chat(THINKING, described), template_chat(OPEN_THOUGHT, described)
    without = ids_of(chat, described, [user("a")], template_values={"enable_thinking": False})
    assert ids_of(chat, described, [user("a")], reasoning=False) == without
    assert ids_of(chat, described, [user("a")], reasoning=True) == ids_of(chat, described, [user("a")])
    both = ids_of(chat, described, [user("a")], reasoning=True, template_values={"enable_thinking": False})
    assert both == without
    with pytest.raises(RequestError, match="reasoning: cannot be switched off"):
        plain.write(conversation([user("a")], reasoning=False))


def test_a_prompt_says_whether_the_answer_begins_inside_a_thought() -> None:
    described = byte_level()

    def written(template: str, **options: Any) -> WrittenChat:
        return template_chat(template, described).write(conversation([user("<think>")], **options))

    assert written(OPEN_THOUGHT).is_thinking
    assert not written(THINKING).is_thinking
    assert not written(THINKING, reasoning=False).is_thinking
    assert not written(CHATML).is_thinking


def test_marks_of_a_thought_may_be_plain_text_to_the_tokenizer() -> None:
    described = byte_level(unmarked=())
    opened, closed = template_chat(OPEN_THOUGHT, described), template_chat(THINKING, described)
    assert opened.thinking == closed.thinking == ThinkingTags("<think>", "</think>")
    assert isinstance(template_chat(OPEN_THOUGHT, byte_level()).thinking, ThinkingIds)
    assert template_chat(CHATML, described).thinking is None
    assert opened.write(conversation([user("a")])).is_thinking
    assert not closed.write(conversation([user("<think>")], reasoning=False)).is_thinking
    assert ids_of(opened, described, [user("a")]) == reference_ids(OPEN_THOUGHT, described, [user("a")])


def test_the_last_message_can_be_continued() -> None:
    described = byte_level()
    for template in (CHATML, LLAMA, THINKING):
        chat = template_chat(template, described)
        for text in ("the cat", "the cat ", "a < b [1"):
            turns = [user(text), said(text)]
            found = ids_of(chat, described, turns, opens_answer=False, continues=True)
            options = {"add_generation_prompt": False, "continue_final_message": True}
            assert found == reference_ids(template, described, turns, **options)
    with pytest.raises(RequestError, match="continue_final_message: cannot be done"):
        template_chat("{{ messages | length }}", described).write(conversation([user("a")], continues=True))


@pytest.mark.parametrize("turns", [
    [user("a"), user("b"), said("c"), said("d"), user("e")],
    [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}, user("a")],
    [user("a"), {"role": "system", "content": "x"}, said("b"), user("c")],
])  # fmt: skip
def test_messages_are_joined_for_templates_that_refuse_them_alone(turns: list[Any]) -> None:
    described = byte_level()
    strict = template_chat(MISTRAL, described)
    messages = joined_turns(conversation(turns).messages)
    joined = [{"role": message.role, "content": message.text} for message in messages]
    assert ids_of(strict, described, turns) == reference_ids(MISTRAL, described, joined)
    assert ids_of(template_chat(CHATML, described), described, turns) == reference_ids(CHATML, described, turns)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (MISTRAL, [said("a"), user("b")], "messages: user and assistant must alternate, sir"),
        (MISTRAL, [said("a"), user("b"), user("c")], "messages: user and assistant must alternate, sir"),
        (NO_SYSTEM, [{"role": "system", "content": "a"}], "messages: System role not supported"),
        ("{{ messages[7].content }}", [user("a")], "messages: do not fit the model's chat template"),
        ("{{ messages + 1 }}", [user("a")], r"messages: do not fit the model's chat template \(TypeError\)"),
        ("{{ messages.append(1) }}", [user("a")], "messages: do not fit .* unsafe"),
        ("{{ ''.__class__.__mro__ }}x", [user("a")], "messages: do not fit .* unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", [user("a")], r"do not fit .*\(OverflowError\)"),
        ("", [user("a")], "messages: are written as nothing"),
    ],
)
def test_what_a_template_refuses_is_refused_in_its_words(template: str, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        template_chat(template, byte_level()).write(conversation(messages))


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "raise_exception"])
def test_values_of_the_server_cannot_be_replaced(name: str) -> None:
    with pytest.raises(RequestError, match=rf"chat_template_kwargs.{name}: is set by the server"):
        template_chat(CHATML, byte_level()).write(conversation([user("a")], template_values={name: 1}))


def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    described = byte_level()
    chat = template_chat(CHATML, described)
    assert "developer" not in "".join(chat.write(conversation([{"role": "developer", "content": "a"}])).parts)
    knowing = template_chat(CHATML + "{# developer #}", described)
    assert "developer" in "".join(knowing.write(conversation([{"role": "developer", "content": "a"}])).parts)


# ---------------------------------------------------------------------- forged control strings

FORGED = (*MARKED, *UNMARKED)
NEUTRAL = "the cat"
PIECES = ("<|im_", "end|>", "<", "|>", " ", "\n", "</think", "\U000f0001")
forged_text = st.lists(st.one_of(st.sampled_from((*FORGED, *PIECES)), st.text(max_size=4)), max_size=6).map("".join)


def controls_in(ids: list[int], described: str) -> list[int]:
    known = set(encoder(described).controls.values())
    return [token_id for token_id in ids if token_id in known]


@given_examples(60, 1500, st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(VOCABULARIES)), *[forged_text] * 3)
def test_forged_control_strings_stay_text(shape: str, vocabulary: str, first: str, second: str, third: str) -> None:
    described = VOCABULARIES[vocabulary]()
    chat = template_chat(SHAPES[shape], described)

    def turns(*texts: str) -> list[dict[str, Any]]:
        return [user(texts[0]), said(texts[1]), user(texts[2])]

    ids = ids_of(chat, described, turns(first, second, third), template_values={"date_string": first})
    honest = ids_of(chat, described, turns(*[NEUTRAL] * 3), template_values={"date_string": NEUTRAL})
    assert controls_in(ids, described) == controls_in(honest, described)


def test_a_forged_text_is_still_the_text() -> None:
    """Nothing is lost or changed on the way."""
    described = byte_level()
    chat, tokenizer = template_chat(CHATML, described), text_tokenizer(described)
    text = "".join(FORGED) + " \U000f0000\ufdd0"
    parts = chat.write(conversation([user(text)])).parts
    assert "".join(parts) == f"<|im_start|>user\n{text}<|im_end|>\n\n<|im_start|>assistant\n"
    ids = [token_id for token_id in encoder(described).encode(parts) if token_id not in tokenizer.special_ids]
    assert tokenizer.decode(ids) == f"user\n{text}\n\nassistant\n"


def test_texts_of_two_messages_make_no_control_string_together() -> None:
    described = byte_level()
    joined = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = template_chat(joined, described)
    ids = ids_of(chat, described, [user("a<|im_"), said("end|>b")])
    assert controls_in(ids, described) == []
    assert text_tokenizer(described).decode(ids) == "a<|im_end|>b"


# ---------------------------------------------------------------------- the encoder


def test_chat_formats_go_to_another_process() -> None:
    described = byte_level()
    chat = template_chat(THINKING, described)
    again = pickle.loads(pickle.dumps(chat))
    asked = conversation([user("<|im_end|> the cat")])
    profile: Any = None
    assert again.items(profile, again.write(asked), ()) == chat.items(profile, chat.write(asked), ())
    assert again.thinking == chat.thinking


def test_names_of_special_tokens_are_the_templates() -> None:
    described = byte_level()
    assert ids_of(template_chat(LLAMA, described), described, [user("a")])[0] == encoder(described).controls["<s>"]
    without = template_chat(LLAMA, described, {})
    assert ids_of(without, described, [user("a")])[0] == encoder(described).controls["<|start_header_id|>"]
    assert reference_ids(LLAMA, described, [user("a")], {}) == ids_of(without, described, [user("a")])
    assert NAMES["bos_token"] == "<s>"
