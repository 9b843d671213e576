"""What a context is made of: frozen values, no tensors.

A context is a sequence of items. Text, coordinate and size tokens take one position each; an image span takes
`num_positions` and is indivisible, because its positions attend to each other both ways.

Prompts have thousands of tokens: what is done to each of them here is done without Python code per token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextToken:
    id: int


@dataclass(frozen=True, slots=True)
class CoordToken:
    """One normalised coordinate, 0 to 1."""

    value: float


@dataclass(frozen=True, slots=True)
class SizeToken:
    """A normalised width and height, 0 to 1."""

    width: float
    height: float


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image inside a context.

    `bos_id` is set when the beginning-of-text token is part of the span's bidirectional block (the image directly
    follows it); the span then has one position more than the image has embeddings.
    """

    digest: str
    num_positions: int
    bos_id: int | None = None


Token: TypeAlias = TextToken | CoordToken | SizeToken
ContextItem: TypeAlias = TextToken | CoordToken | SizeToken | ImageSpan


def item_positions(item: ContextItem) -> int:
    return item.num_positions if isinstance(item, ImageSpan) else 1


def has_pictures(items: Collection[object]) -> bool:
    return ImageSpan in set(map(type, items))


def num_positions(items: Collection[ContextItem]) -> int:
    return sum(map(item_positions, items)) if has_pictures(items) else len(items)


def ids_if_text(items: Collection[object]) -> list[int] | None:
    """The ids of text tokens, None if there is anything else among the items."""
    return list(map(_id_of, items)) if set(map(type, items)) <= {TextToken} else None


def text_tokens(ids: Sequence[int]) -> list[ContextItem]:
    if ids and not 0 <= min(ids) <= max(ids) < MAX_KEPT_IDS:
        return [TextToken(i) for i in ids]
    return list(map(_text_token, ids))


_id_of = attrgetter("id")
_text_token = lru_cache(maxsize=None)(TextToken)
"""One object per id, for good: making a new one takes five times as long."""
MAX_KEPT_IDS = 1 << 18
"""Larger than vocabularies are; callers may name any number."""
