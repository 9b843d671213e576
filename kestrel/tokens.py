"""What a context is made of: frozen values, no tensors.

A context is a sequence of items. Text, coordinate and size tokens take one position each; an image span takes
`num_positions` and is indivisible, because its positions attend to each other both ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


def num_positions(items: Iterable[ContextItem]) -> int:
    return sum(item_positions(item) for item in items)


def text_tokens(ids: Sequence[int]) -> list[ContextItem]:
    return [TextToken(i) for i in ids]
