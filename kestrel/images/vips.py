"""pyvips images as pictures, recognised without importing pyvips."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kestrel.errors import RequestError
from kestrel.images.arrays import pixels_from_array
from kestrel.images.limits import ImageLimits

_DIRECT = ("b-w", "srgb", "rgb", "multiband")


def is_vips_image(source: object) -> bool:
    """Nobody can hold a pyvips image unless pyvips is loaded already."""
    pyvips = sys.modules.get("pyvips")
    return pyvips is not None and isinstance(source, pyvips.Image)


def pixels_from_vips(image: Any, limits: ImageLimits) -> np.ndarray:
    """The pixels as they are (no rotation); other colour spaces and depths are brought to 8-bit sRGB by libvips."""
    limits.check_size(image.height, image.width)
    try:
        if image.format != "uchar" or image.interpretation not in _DIRECT:
            image = image.colourspace("srgb")
        pixel_bytes = image.write_to_memory()
    except sys.modules["pyvips"].Error as error:
        raise RequestError("image", f"pyvips could not read the picture ({error}); send a complete file") from error
    if image.format != "uchar":
        raise RequestError("image", f"pyvips pixels of format {image.format} are not supported; cast them to uchar")
    array = np.frombuffer(pixel_bytes, dtype=np.uint8).reshape(image.height, image.width, image.bands)
    return pixels_from_array(array[:, :, :1] if image.bands == 2 else array, limits)
