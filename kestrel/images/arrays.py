"""NumPy arrays as pictures: grey is repeated, alpha is dropped, anything else is refused by name."""

from __future__ import annotations

import numpy as np

from kestrel.errors import RequestError
from kestrel.images.limits import ImageLimits

_REMEDY = "pass uint8 [height, width, 3] RGB, [height, width, 4] RGBA, or [height, width] grey"


def pixels_from_array(array: np.ndarray, limits: ImageLimits) -> np.ndarray:
    """[height, width, 3] uint8, possibly a view of `array`."""
    if array.dtype != np.uint8:
        raise RequestError("image", f"an array of {array.dtype} is not supported; {_REMEDY}")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise RequestError("image", f"an array of shape {tuple(array.shape)} is not a picture; {_REMEDY}")
    limits.check_size(array.shape[0], array.shape[1])
    if array.ndim == 2 or array.shape[2] == 1:
        return repeat_grey(array.reshape(array.shape[:2]))
    return array[:, :, :3]


def repeat_grey(grey: np.ndarray) -> np.ndarray:
    """[height, width] -> [height, width, 3]."""
    return np.repeat(grey[:, :, None], 3, axis=2)
