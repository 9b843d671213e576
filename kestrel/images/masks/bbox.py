"""Boxes relative to the picture: fields from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping

from kestrel.errors import RequestError

BOX_FIELDS = ("x_min", "y_min", "x_max", "y_max")


def box_values(bbox: Mapping[str, float]) -> tuple[float, float, float, float]:
    """(x_min, y_min, x_max, y_max), checked."""
    missing = [name for name in BOX_FIELDS if name not in bbox]
    if missing:
        raise RequestError("bbox", f"lacks {', '.join(missing)}; give {', '.join(BOX_FIELDS)}")
    try:
        x_min, y_min, x_max, y_max = (float(bbox[name]) for name in BOX_FIELDS)
    except (TypeError, ValueError) as error:
        raise RequestError("bbox", f"needs numbers (got {dict(bbox)})") from error
    if not (0 <= x_min <= x_max <= 1 and 0 <= y_min <= y_max <= 1):
        raise RequestError("bbox", f"needs numbers from 0 to 1 with min <= max (got {dict(bbox)})")
    return x_min, y_min, x_max, y_max
