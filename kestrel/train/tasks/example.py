"""One training example: a request to a skill and what the model should generate, and both as typed tokens.

The prompt is laid out by the engine's own skill, so that training sees exactly what inference will send. The target
ends with the end id. Loss applies to every target token and to nothing of the prompt.

Short answers are in lower case without a full stop: counts as digits, "yes" or "no", "nothing" for an empty place.
A question about something that is not there ("What colour is the star?" without a star) is answered "no". Printed text
is answered as printed, one token per character, because a reader spells what it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer as TokenizerJson

from kestrel.models.tokenizer import TextTokenizer
from kestrel.skills.base import ModelProfile, RegionIds, SkillRegistry
from kestrel.skills.model_facts import Template
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
        regions = profile.regions
        assert regions is not None
        assert profile.answer_id is not None
        self._special = {
            "answer": TextToken(profile.answer_id),
            "start_ground": TextToken(regions.start_ground),
            "end_ground": TextToken(regions.end_ground),
        }
        self._end = TextToken(profile.end_id)

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
            return tuple(skill.prompt(skill.parse(fields, self._profile), (), self._profile).items)
        request = skill.parse({**fields, "image": _PICTURE}, self._profile)
        return tuple(skill.prompt(request, (_SPAN,), self._profile).items[1:])

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


@dataclass(frozen=True)
class PromptFormat:
    """What turns a request into ids, as plain data that can cross to a process."""

    tokenizer_json: str
    bos: int
    end_id: int
    answer_id: int
    thinking_id: int
    regions: RegionIds
    templates: Mapping[str, Template]
    """By skill, as in `ModelProfile`."""

    def profile(self) -> ModelProfile:
        """A Moondream 3 as the skills see it: one answer suffix or one thinking id opens what the model says."""
        return ModelProfile(
            name="training",
            tokenizer=TextTokenizer(TokenizerJson.from_str(self.tokenizer_json)),
            bos=self.bos,
            stop_ids=(self.end_id,),
            has_vision=True,
            templates=dict(self.templates),
            answer_opener=self.templates["query"].suffix,
            reasoning_opener=(self.thinking_id,),
            answer_id=self.answer_id,
            regions=self.regions,
            compares_coord_and_eos_only=True,
        )


# ---------------------------------------------------------------------- English as people type it

_LOWERED, _UNPUNCTUATED, _POLITE = 0.15, 0.12, 0.04


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def asked(rng: Random, templates: Sequence[str], **slots: str) -> str:
    """One of the templates, filled in, typed as people do: sometimes in lower case, without the mark, or politely."""
    question = rng.choice(templates).format(**slots)
    if rng.random() < _POLITE:
        question = f"Please: {question}" if rng.random() < 0.5 else f"{question} Please."
    if rng.random() < _UNPUNCTUATED:
        question = question.rstrip("?.! ")
    return question.lower() if rng.random() < _LOWERED else question


def typed(rng: Random, noun: str) -> str:
    """An object's name as people type it: mostly plain, sometimes capitalised."""
    return capitalised(noun) if rng.random() < 0.06 else noun


# ---------------------------------------------------------------------- short answers

UNANSWERABLE = "no"
NOTHING = "nothing"
UNANSWERABLE_SHARE = 0.12


def direct(family: str, question: str, *answer: Piece, refs: tuple[tuple[float, ...], ...] = ()) -> TaskExample:
    """A question that is answered without a thought."""
    fields: dict[str, object] = {"question": question, "reasoning": False}
    if refs:
        fields["spatial_refs"] = refs
    return TaskExample(family, "query", fields, answer)


def yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def spelt(text: str) -> Apart:
    return Apart(tuple(text))
