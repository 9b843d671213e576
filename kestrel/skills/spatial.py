"""Spatial references: points and boxes on the picture that a request talks about, as context tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from kestrel.errors import RequestError, shown
from kestrel.skills.checks import is_number
from kestrel.tokens import ContextItem, CoordToken, SizeToken

SpatialRef: TypeAlias = tuple[float, ...]
"""(x, y) or (x_min, y_min, x_max, y_max), all from 0 to 1."""


def spatial_refs(name: str, value: Any) -> tuple[SpatialRef, ...]:
    """Checked references; an error names the entry, as in spatial_refs[2]."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(
            name, f"must be a list of points [x, y] and boxes [x_min, y_min, x_max, y_max] (got {shown(value)})"
        )
    return tuple(_spatial_ref(f"{name}[{index}]", ref) for index, ref in enumerate(value))


def spatial_tokens(refs: Iterable[SpatialRef]) -> list[ContextItem]:
    """A point is its two coordinates; a box is its centre's two coordinates and its size."""
    items: list[ContextItem] = []
    for ref in refs:
        if len(ref) == 2:
            items += [CoordToken(ref[0]), CoordToken(ref[1])]
        else:
            x_min, y_min, x_max, y_max = ref
            items += [CoordToken((x_min + x_max) / 2), CoordToken((y_min + y_max) / 2)]
            items.append(SizeToken(x_max - x_min, y_max - y_min))
    return items


def _spatial_ref(name: str, ref: Any) -> SpatialRef:
    if not isinstance(ref, (list, tuple)) or len(ref) not in (2, 4):
        raise RequestError(name, f"must be [x, y] or [x_min, y_min, x_max, y_max] (got {shown(ref)})")
    for value in ref:
        if not is_number(value) or not 0.0 <= value <= 1.0:
            raise RequestError(name, f"must hold numbers from 0 to 1, as shares of the picture (got {shown(value)})")
    if len(ref) == 4 and (ref[0] > ref[2] or ref[1] > ref[3]):
        raise RequestError(name, f"must have x_min ≤ x_max and y_min ≤ y_max (got {shown(ref)})")
    return tuple(float(value) for value in ref)
