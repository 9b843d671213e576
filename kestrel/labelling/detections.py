"""A row as `supervision.Detections`, for that library's annotators, trackers and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from kestrel.errors import ConfigError
from kestrel.images.masks import BOX_FIELDS, rasterise_path
from kestrel.labelling.formats.shapes import pixel_box
from kestrel.labelling.records import REJECTED, Box, Found, Row


def as_detections(row: Row, classes: Sequence[str] | None = None) -> Any:
    """Boxes in pixels, `class_id` in the order of `classes` (by default of the row's labels, sorted), names in
    `data["class_name"]`; `confidence` where every object has a score, `mask` where one has an outline. Rejected
    objects and boxes without area are left out.

    Raises ConfigError where the library is not installed, for a row of points, and for a label not in `classes`.
    """
    supervision = _supervision()
    kept = [(one, box) for one in row.found if one.decision != REJECTED and (box := _box(row, one)) is not None]
    names = tuple(sorted({one.label for one, _ in kept}) if classes is None else classes)
    unknown = sorted({one.label for one, _ in kept} - set(names))
    if unknown:
        raise ConfigError("classes", f"{unknown[0]!r} of {row.file} is not among them; add it")
    scores = [one.score for one, _ in kept]
    return supervision.Detections(
        xyxy=np.array([box for _, box in kept], dtype=np.float64).reshape(-1, 4),
        class_id=np.array([names.index(one.label) for one, _ in kept], dtype=int),
        confidence=None if None in scores else np.array(scores, dtype=np.float64),
        mask=np.stack([_mask(row, one) for one, _ in kept]) if any(one.path for one, _ in kept) else None,
        data={"class_name": np.array([one.label for one, _ in kept], dtype=str)},
    )


def _supervision() -> Any:
    try:
        return import_module("supervision")
    except ModuleNotFoundError as error:
        if error.name != "supervision":
            raise
        raise ConfigError("supervision", "is not installed; run `pip install supervision`") from error


def _box(row: Row, one: Found) -> Box | None:
    if one.box is None:
        raise ConfigError("row", f"{row.file} has points, and detections are boxes; take them from `row.found`")
    return pixel_box(row, one.box)


def _mask(row: Row, one: Found) -> np.ndarray:
    assert one.box is not None
    box: dict[str, float] = dict(zip(BOX_FIELDS, one.box, strict=True))
    return rasterise_path(one.path or "M 0 0 H 1 V 1 H 0 Z", box, row.height, row.width)
