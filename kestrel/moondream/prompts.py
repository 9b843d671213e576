"""What the skills may know about a loaded Moondream, and how it is given a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kestrel.errors import RequestError
from kestrel.moondream.config import MoondreamConfig
from kestrel.settings import text
from kestrel.skills.base import ConstraintSource, Conversation, ModelProfile, RegionIds, Tokenizer, WrittenChat
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
        chat=QueryBlocks() if "query" in ids.templates else None,
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
    the assistant's text; a leading system message stands before the first user text.
    """

    roles = ("system", "user", "assistant")
    message_fields = ()
    template = None
    thinking = None
    tools = None

    def write(self, conversation: Conversation) -> WrittenChat:
        """An optional system message, then user and assistant in turn, a user last."""
        _refuse_template_values(conversation)
        messages = conversation.messages
        expected = "user"
        for message in messages[1:] if messages[0].role == "system" else messages:
            if message.role != expected:
                remedy = "user and assistant must take turns, with a system message only at the front"
                problem = f"is {message.role!r} where {expected!r} must follow; {remedy}"
                raise RequestError(f"{message.field}.role", problem)
            if message.role == "user":
                text(f"{message.field}.content", message.text)
            expected = "assistant" if expected == "user" else "user"
        if messages[-1].role != "user":
            raise RequestError("messages", "must end with a user message, the one to answer")
        return WrittenChat(conversation)

    def items(self, profile: ModelProfile, written: WrittenChat, images: Sequence[ImageSpan]) -> list[ContextItem]:
        messages, reasoning = written.conversation.messages, written.conversation.reasoning
        prefix, spans = template_of(profile, "query").prefix, iter(images)
        system = f"{messages[0].text}\n\n" if messages[0].role == "system" and messages[0].text else ""
        items: list[ContextItem] = []
        for message in messages:
            if message.role == "assistant":
                items += Text(profile.tokenizer.encode(message.text))
            elif message.role == "user":
                own = _take(spans, len(message.images))
                question = message.text if items else system + message.text
                items += own if items else opening(profile, own)
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
            raise RequestError(name, "is for models with a chat template, which this one has not; leave it out")


def _take(spans: Iterator[ImageSpan], count: int) -> list[ImageSpan]:
    return [next(spans) for _ in range(count)]
