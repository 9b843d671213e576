"""What the skills may know about a loaded Moondream, and how it is given a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kestrel.errors import RequestError
from kestrel.moondream.config import PICTURE_QUESTION, MoondreamConfig
from kestrel.skills.base import (
    ConstraintSource,
    Conversation,
    ModelProfile,
    RegionIds,
    Tokenizer,
    WrittenChat,
    joined_turns,
)
from kestrel.skills.builtin import block, opening, template_of
from kestrel.tokens import ContextItem, ImageSpan, Text


def moondream_profile(
    config: MoondreamConfig, tokenizer: Tokenizer, name: str, constraints: ConstraintSource | None = None
) -> ModelProfile:
    """Ids, templates, openers and defaults, all of them from the config. A skill without a template is not offered."""
    ids = config.tokenizer
    generation = config.generation
    return ModelProfile(
        name=name,
        tokenizer=tokenizer,
        bos=ids.bos_id,
        stop_ids=(ids.eos_id,),
        defaults=generation.defaults,
        has_vision=True,
        chat=QueryBlocks(generation.picture_question) if "query" in ids.templates else None,
        templates=ids.templates,
        answer_opener=generation.query_answer_opener,
        reasoning_opener=generation.query_reasoning_opener,
        answer_id=ids.answer_id,
        regions=RegionIds(ids.coord_id, ids.size_id, ids.start_ground_points_id, ids.end_ground_id),
        compares_coord_and_eos_only=generation.compares_coord_and_eos_only,
        constraints=constraints,
    )


class QueryBlocks:
    """`ChatFormat`: a conversation as query blocks one after another. Moondream has no chat format of its own.

    After one beginning-of-text token each user message is its pictures, then a query block with the answer opener and
    the assistant's text; the system message stands before the first user text. Pictures without words are asked about
    by the system message, or by the model's question for that; a message with neither is an empty question.
    """

    roles = ("system", "user", "assistant")
    message_fields = ()
    template = None
    thinking = None
    tools = None

    def __init__(self, picture_question: str = PICTURE_QUESTION) -> None:
        self._picture_question = picture_question

    def write(self, conversation: Conversation) -> WrittenChat:
        """Whatever the order of the messages, as long as a user has the last word."""
        _refuse_template_values(conversation)
        messages = joined_turns(conversation.messages)
        if messages[-1].role != "user":
            raise RequestError("messages", "must end with a user message, the one to answer")
        return WrittenChat(replace(conversation, messages=messages))

    def items(self, profile: ModelProfile, written: WrittenChat, images: Sequence[ImageSpan]) -> list[ContextItem]:
        messages, reasoning = written.conversation.messages, written.conversation.reasoning
        prefix, spans, system = template_of(profile, "query").prefix, iter(images), ""
        items: list[ContextItem] = []
        for message in messages:
            if message.role == "system":
                system = message.text
                continue
            own = _take(spans, len(message.images))
            items += own if items else opening(profile, own)
            if message.role == "assistant":
                items += Text(profile.tokenizer.encode(message.text))
                continue
            question = "\n\n".join(words for words in (system, message.text) if words.strip())
            if message.images and not question:
                question = self._picture_question
            system = ""
            opens_thinking = reasoning and message is messages[-1]
            opener = profile.reasoning_opener if opens_thinking else profile.answer_opener
            items += block(profile, prefix, (), question, opener)
        return items


def _refuse_template_values(conversation: Conversation) -> None:
    given = {
        "chat_template_kwargs": bool(conversation.template_values),
        "continue_final_message": conversation.continues,
        "add_generation_prompt": not conversation.opens_answer,
    }
    for name, is_given in given.items():
        if is_given:
            raise RequestError(name, "is for models with a chat template, which this model does not have; leave it out")


def _take(spans: Iterator[ImageSpan], count: int) -> list[ImageSpan]:
    return [next(spans) for _ in range(count)]
