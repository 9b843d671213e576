"""The form of a mask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import RequestError

Mask = NDArray[np.bool_]


def check_mask(mask: Mask) -> None:
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise RequestError("mask", f"must be [height, width] bool (got {mask.shape} {mask.dtype})")
