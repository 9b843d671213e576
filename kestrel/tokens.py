"""What a context is made of: frozen values, no tensors.

A context is a sequence of items. Text, coordinate and size tokens take one position each; an image span takes
`num_positions` and is indivisible, because its positions attend to each other both ways.

Prompts have thousands of tokens. Those of text alone are a `Text`, which holds ids and makes a token when it is asked
for one; what is done to other contexts here is done without Python code per token where it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias, overload


@dataclass(frozen=True, slots=True)
class TextToken:
    id: int


@dataclass(frozen=True, slots=True)
class CoordToken:
    """One normalised coordinate, 0 to 1."""

    value: float
    logprob: float = field(default=0.0, compare=False)
    """How sure the model was of it, where the model wrote it (see `RegionPart`); 0 in prompts."""


@dataclass(frozen=True, slots=True)
class SizeToken:
    """A normalised width and height, 0 to 1."""

    width: float
    height: float
    logprob: float = field(default=0.0, compare=False)


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


class Text(Sequence[TextToken]):
    """Text tokens by their ids."""

    __slots__ = ("ids",)

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = list(ids)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> TextToken: ...

    @overload
    def __getitem__(self, index: slice) -> Text: ...

    def __getitem__(self, index: int | slice) -> TextToken | Text:
        return Text(self.ids[index]) if isinstance(index, slice) else TextToken(self.ids[index])

    def __iter__(self) -> Iterator[TextToken]:
        return map(TextToken, self.ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Text):
            return self.ids == other.ids
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Text({self.ids})"

    def append(self, token: TextToken) -> None:
        self.ids.append(token.id)


def has_pictures(items: Sequence[object]) -> bool:
    return not isinstance(items, Text) and ImageSpan in set(map(type, items))


def num_positions(items: Sequence[ContextItem]) -> int:
    if not has_pictures(items):
        return len(items)
    return len(items) + sum([item.num_positions - 1 for item in items if isinstance(item, ImageSpan)])


def ids_if_text(items: Sequence[object]) -> list[int] | None:
    """The ids of text tokens, None if there is anything else among the items."""
    if isinstance(items, Text):
        return items.ids
    return list(map(_id_of, items)) if set(map(type, items)) <= {TextToken} else None


_id_of = attrgetter("id")
