"""One training example: a request to a skill and what the model should generate, and both as typed tokens.

The prompt is laid out by the engine's own skill, so that training sees exactly what inference will send. The target
ends with the end id. Loss applies to every target token and to nothing of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from kestrel.skills.base import ModelProfile, SkillRegistry
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, Token

_PICTURE = "picture"  # skills hand pictures on unread; any value stands for one
_SPAN = ImageSpan("picture", 1)
_CACHED_TEXTS = 1 << 14


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control id, named as in the model's profile."""

    name: Literal["answer", "start_ground", "end_ground"]


@dataclass(frozen=True, slots=True)
class Apart:
    """Text in pieces that are tokenised one by one: items of a path, characters of a printed word."""

    pieces: tuple[str, ...]


Piece: TypeAlias = str | Apart | CoordToken | SizeToken | SpecialToken


@dataclass(frozen=True, slots=True)
class TaskExample:
    """`fields` go to the skill as a caller would give them, without the picture; `target` leaves out the end id."""

    family: str
    skill: str
    fields: Mapping[str, Any]
    target: tuple[Piece, ...]
    sees_image: bool = True


@dataclass(frozen=True, slots=True)
class EncodedTask:
    """`prompt_items` leave out the image span; without a picture they begin with the beginning-of-text token."""

    prompt_items: tuple[ContextItem, ...]
    target_items: tuple[Token, ...]
    sees_image: bool = True

    @property
    def num_inputs(self) -> int:
        """Positions it takes in training: the last target token is never fed."""
        return len(self.prompt_items) + len(self.target_items) - 1


class TaskEncoder:
    """Encodes examples for one model; texts that come again are tokenised once."""

    def __init__(self, profile: ModelProfile, registry: SkillRegistry) -> None:
        self._profile = profile
        self._registry = registry
        self._text = lru_cache(_CACHED_TEXTS)(self._encoded_text)
        self._plain_prompt = lru_cache(_CACHED_TEXTS)(self._prompt_of_items)
        ids = profile.ids
        self._special = {
            "answer": TextToken(ids.answer),
            "start_ground": TextToken(ids.start_ground),
            "end_ground": TextToken(ids.end_ground),
        }
        self._end = TextToken(ids.eos)

    def encode(self, example: TaskExample) -> EncodedTask:
        if "spatial_refs" in example.fields:  # hardly ever the same twice
            prompt = self._prompt(example.skill, example.fields, example.sees_image)
        else:
            prompt = self._plain_prompt(example.skill, tuple(example.fields.items()), example.sees_image)
        return EncodedTask(prompt, (*self._target(example.target), self._end), example.sees_image)

    def _prompt_of_items(
        self, skill: str, fields: tuple[tuple[str, Any], ...], sees_image: bool
    ) -> tuple[ContextItem, ...]:
        return self._prompt(skill, dict(fields), sees_image)

    def _prompt(self, name: str, fields: Mapping[str, Any], sees_image: bool) -> tuple[ContextItem, ...]:
        skill = self._registry.get(name)
        if not sees_image:
            return skill.prompt(skill.parse(fields, self._profile), (), self._profile).items
        request = skill.parse({**fields, "image": _PICTURE}, self._profile)
        return skill.prompt(request, (_SPAN,), self._profile).items[1:]

    def _target(self, pieces: tuple[Piece, ...]) -> Iterator[Token]:
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._text(piece)
            elif isinstance(piece, Apart):
                for part in piece.pieces:
                    yield from self._text(part)
            elif isinstance(piece, SpecialToken):
                yield self._special[piece.name]
            else:
                yield piece

    def _encoded_text(self, text: str) -> tuple[TextToken, ...]:
        return tuple(TextToken(token_id) for token_id in self._profile.tokenizer.encode(text))


def encode(example: TaskExample, profile: ModelProfile, registry: SkillRegistry) -> EncodedTask:
    """One example; a `TaskEncoder` is faster for many."""
    return TaskEncoder(profile, registry).encode(example)
