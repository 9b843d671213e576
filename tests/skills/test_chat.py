from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kestrel.errors import RequestError
from kestrel.moondream.config import PICTURE_QUESTION
from kestrel.moondream.prompts import QueryBlocks
from kestrel.skills.base import ModelProfile
from kestrel.skills.chat import ChatSkill
from kestrel.tokens import ContextItem, ImageSpan, Text, TextToken

SKILL = ChatSkill()
FIRST, SECOND, THIRD = "picture 1", "picture 2", "picture 3"


def user(first: Any, *parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [first, *parts] if parts else first}


def image(picture: str) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "be brief"}


def items_of(profile: ModelProfile, messages: list[Any], **fields: Any) -> list[ContextItem]:
    request = SKILL.parse({"messages": messages, "reasoning": False, **fields}, profile)
    spans = [ImageSpan(picture, 729) for picture in request.images]
    return list(SKILL.prompt(request, spans, profile).items)


def question(profile: ModelProfile, text: str, opener: tuple[int, ...]) -> list[ContextItem]:
    return Text([*profile.templates["query"].prefix, *profile.tokenizer.encode(text), *opener])


def test_one_turn_is_a_query(md2: ModelProfile) -> None:
    assert items_of(md2, [user("what?")]) == [TextToken(0), *question(md2, "what?", (3, 3))]


def test_turns_are_query_blocks_after_one_beginning(md2: ModelProfile) -> None:
    assert items_of(md2, [user("what?"), said(" a dog"), user("where?")]) == [
        TextToken(0),
        *question(md2, "what?", (3, 3)),
        *Text(md2.tokenizer.encode(" a dog")),
        *question(md2, "where?", (3, 3)),
    ]


def test_only_the_last_turn_opens_reasoning(md3: ModelProfile) -> None:
    assert items_of(md3, [user("what?"), said("dog"), user("why?")], reasoning=True) == [
        TextToken(0),
        *question(md3, "what?", (3,)),
        *Text(md3.tokenizer.encode("dog")),
        *question(md3, "why?", (4,)),
    ]


def test_a_system_message_stands_before_the_first_question(md2: ModelProfile) -> None:
    items = items_of(md2, [SYSTEM, user("what?"), said("dog"), user("why?")])
    assert items[1 : 1 + len(question(md2, "be brief\n\nwhat?", (3, 3)))] == question(md2, "be brief\n\nwhat?", (3, 3))
    assert items[-len(question(md2, "why?", (3, 3))) :] == question(md2, "why?", (3, 3))


def test_an_empty_system_message_adds_nothing(md2: ModelProfile) -> None:
    assert items_of(md2, [{"role": "system", "content": ""}, user("what?")]) == items_of(md2, [user("what?")])


def test_a_message_without_words_is_an_empty_question_or_the_system_message(md2: ModelProfile) -> None:
    assert items_of(md2, [user("")]) == [TextToken(0), *question(md2, "", (3, 3))]
    assert items_of(md2, [SYSTEM, user(" ")]) == items_of(md2, [user("be brief")])


def test_pictures_stand_before_their_turn(md2: ModelProfile) -> None:
    turns = [user(words("compare"), image(FIRST), image(SECOND)), said("ok"), user(image(THIRD), words("this?"))]
    assert items_of(md2, turns) == [
        ImageSpan(FIRST, 730, bos_id=0),
        ImageSpan(SECOND, 729),
        *question(md2, "compare", (3, 3)),
        *Text(md2.tokenizer.encode("ok")),
        ImageSpan(THIRD, 729),
        *question(md2, "this?", (3, 3)),
    ]


def test_a_later_picture_does_not_take_the_beginning(md2: ModelProfile) -> None:
    items = items_of(md2, [user("hi"), said("ok"), user(image(FIRST), words("this?"))])
    assert items[0] == TextToken(0)
    assert [item for item in items if isinstance(item, ImageSpan)] == [ImageSpan(FIRST, 729)]


def test_a_picture_beside_the_messages_comes_first(md2: ModelProfile) -> None:
    items = items_of(md2, [user(image(SECOND), words("what?"))], image=FIRST)
    assert items[:2] == [ImageSpan(FIRST, 730, bos_id=0), ImageSpan(SECOND, 729)]


def test_text_parts_become_lines(md2: ModelProfile) -> None:
    assert items_of(md2, [user(words("a"), words("b"))]) == items_of(md2, [user("a\nb")])


def alone(*pictures: str) -> dict[str, Any]:
    return {"role": "user", "content": [image(picture) for picture in pictures]}


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ([alone(FIRST)], [user(image(FIRST), words(PICTURE_QUESTION))]),
        ([alone(FIRST), said("a dog"), user("why?")],
         [user(image(FIRST), words(PICTURE_QUESTION)), said("a dog"), user("why?")]),
        ([alone(FIRST), user("what?")], [user(image(FIRST), words("what?"))]),
        ([user("these:"), alone(FIRST), alone(SECOND)], [user(words("these:"), image(FIRST), image(SECOND))]),
        ([user("a"), user(""), user("b")], [user("a\nb")]),
        ([user("a"), said("x"), said("y"), user("b")], [user("a"), said("x\ny"), user("b")]),
        ([SYSTEM, user("a"), {"role": "system", "content": "in French"}],
         [{"role": "system", "content": "be brief\nin French"}, user("a")]),
        ([user("a"), SYSTEM, user("b")], [SYSTEM, user("a\nb")]),
        ([user("a"), {"role": "assistant", "content": None}, user("b")], [user("a"), said(""), user("b")]),
        ([user("a"), {"role": "assistant"}, user("b")], [user("a"), said(""), user("b")]),
    ],
)  # fmt: skip
def test_conversations_out_of_turn_are_put_in_order(given: list[Any], same: list[Any], md2: ModelProfile) -> None:
    assert items_of(md2, given) == items_of(md2, same)


def test_a_model_may_have_its_own_question_about_pictures_without_words(md2: ModelProfile) -> None:
    own = replace(md2, chat=QueryBlocks("What is there?"))
    assert items_of(own, [alone(FIRST)]) == items_of(md2, [user(image(FIRST), words("What is there?"))])


def calling(arguments: Any, content: str | None = None) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ([user("a"), calling('{"x":1}'), {"role": "tool", "tool_call_id": "c1", "content": "done"}],
         [user("a"), said('{"name": "f", "parameters": {"x": 1}}'), user("done")]),
        ([user("a"), calling({"x": "ü"}, "I look."), user("b")],
         [user("a"), said('I look.\n{"name": "f", "parameters": {"x": "ü"}}'), user("b")]),
        ([user("a"), {"role": "tool", "name": "f", "content": [words("done")]}, user("b")], [user("a\ndone\nb")]),
    ],
)  # fmt: skip
def test_a_model_without_tools_reads_calls_and_results_as_words(
    given: list[Any], same: list[Any], md2: ModelProfile
) -> None:
    assert items_of(md2, given) == items_of(md2, same)


def test_a_system_message_asks_about_a_picture_without_words(md2: ModelProfile) -> None:
    items = items_of(md2, [SYSTEM, alone(FIRST)])
    assert items == [ImageSpan(FIRST, 730, bos_id=0), *question(md2, "be brief", (3, 3))]


def test_an_assistant_may_speak_first(md2: ModelProfile) -> None:
    assert items_of(md2, [SYSTEM, said("hello"), user(image(FIRST), words("what?"))]) == [
        TextToken(0),
        *Text(md2.tokenizer.encode("hello")),
        ImageSpan(FIRST, 729),
        *question(md2, "be brief\n\nwhat?", (3, 3)),
    ]


def test_the_result_is_a_querys(md3: ModelProfile) -> None:
    request = SKILL.parse({"messages": [user("what?")]}, md3)
    assert request.reasoning
    state = SKILL.start(request, md3)
    for token_id in (*md3.tokenizer.encode("so"), 3, *md3.tokenizer.encode("dog")):
        state.consume(TextToken(token_id), None)
    output = state.finish(None)  # pyright: ignore[reportArgumentType]
    assert output.fields == {"answer": "dog", "reasoning": {"text": "so", "grounding": []}}
    assert output.text == "dog"


BAD: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ([SYSTEM], "messages"),
    ([user("a"), said("b")], "messages"),
    (["hello"], "messages[0]"),
    ([{"role": "wizard", "content": "a"}], "messages[0].role"),
    ([{"role": "tool", "content": "a", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ([{"role": "tool", "content": [image(FIRST)]}], "messages[0].content"),
    ([user("a"), calling({"x": 1})], "messages"),
    ([{**calling({"x": 1}), "role": "user", "content": "a"}], "messages[0].tool_calls"),
    ([user("a"), calling("[]"), user("b")], "messages[1].tool_calls[0].function.arguments"),
    ([{"content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "system", "content": None}, user("a")], "messages[0].content"),
    ([user(5)], "messages[0].content"),
    ([{"role": "user", "content": "a", "name": "me"}], "messages[0].name"),
    ([user(words("a"), {"type": "audio", "audio": b""})], "messages[0].content[1]"),
    ([user(words("a"), {"type": "image"})], "messages[0].content[1]"),
    ([user(words("a"), "b")], "messages[0].content[1]"),
    ([user(words("a"), {"type": "text", "text": 5})], "messages[0].content[1].text"),
    ([user("a"), {"role": "assistant", "content": [image(FIRST)]}, user("b")], "messages[1].content"),
    ([{"role": "system", "content": [image(FIRST)]}, user("b")], "messages[0].content"),
]


@pytest.mark.parametrize(("messages", "field"), BAD)
def test_a_bad_message_is_refused_by_place(messages: Any, field: str, md2: ModelProfile) -> None:
    with pytest.raises(RequestError) as caught:
        SKILL.parse({"messages": messages}, md2)
    assert caught.value.field == field
