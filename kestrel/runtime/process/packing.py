"""Messages as bytes: pickles that take dataclasses by their fields.

A step of eight requests has hundreds of small values. As pickle takes dataclasses with slots by itself, packing and
unpacking them took a tenth of the step.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from kestrel.adapters.shared_memory import SentAdapter, TensorPlace
from kestrel.errors import KestrelError
from kestrel.grammar import Edge, Grammar, State
from kestrel.request import PromptOutputs, ScoredToken, TokenLogprobs
from kestrel.runtime.contract import (
    AdapterLoad,
    DecodeRow,
    PageCopy,
    PageWrite,
    PictureSlice,
    PrefillChunk,
    PromptPart,
    RowOutput,
    RowStart,
    StepOutput,
    StepPlan,
)
from kestrel.settings import SamplingParams
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, Text, TextToken

Recipe = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Packed:
    message: bytes
    arrays: Sequence[bytes | memoryview] = ()
    """The numbers of its arrays, such as pixels, where they lie: they are not copied into the message."""


def pack(message: object) -> Packed:
    buffer = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL, buffer_callback=arrays.append)
    pickler.dispatch_table = RECIPES
    pickler.dump(message)
    return Packed(buffer.getvalue(), [array.raw() for array in arrays])


def unpack(packed: Packed) -> Any:
    """Only for what `pack` made: a pickle can do anything."""
    return pickle.loads(packed.message, buffers=packed.arrays)


def by_fields(kind: type, **left_out: object) -> Recipe:
    """Takes an instance apart into its fields; those named are replaced by what is given here."""
    names = [field.name for field in fields(kind) if field.name not in left_out]
    values = attrgetter(*names) if len(names) > 1 else lambda instance: (getattr(instance, names[0]),)
    rest = tuple(left_out.values())
    order = (kind, *names, *left_out)
    return lambda instance: (made_of, (order, values(instance) + rest))


def made_of(order: tuple[Any, ...], values: tuple[object, ...]) -> object:
    """The instance, not checked again: it was when it was made."""
    made = object.__new__(order[0])
    for name, value in zip(order[1:], values, strict=True):
        set_attribute(made, name, value)
    return made


def read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


set_attribute = object.__setattr__
"""Also for frozen ones."""


def portable(error: Exception) -> Exception:
    """The error itself, or what it says where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return KestrelError(f"{type(error).__name__}: {error}")
    return error


BY_FIELDS = (
    *(CoordToken, SizeToken, ImageSpan, Edge, State, Grammar, SamplingParams, PromptOutputs),
    *(RowStart, PageCopy, PageWrite, DecodeRow, StepPlan),
    *(SentAdapter, TensorPlace),
    *(TokenLogprobs, ScoredToken, RowOutput, PromptPart, StepOutput),
)


RECIPES: dict[type, Any] = {
    **copyreg.dispatch_table,
    **{kind: by_fields(kind) for kind in BY_FIELDS},
    Text: lambda text: (Text, (text.ids,)),
    TextToken: lambda token: (TextToken, (token.id,)),  # the most numerous: the short way
    MappingProxyType: lambda mapping: (read_only, (dict(mapping),)),
    PrefillChunk: by_fields(PrefillChunk, images={}),
    PictureSlice: by_fields(PictureSlice, image=None),
    AdapterLoad: by_fields(AdapterLoad, weights=None),
}
