"""Pictures as callers have them, as the bytes of a file."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kestrel.errors import RequestError, shown

ARRAYS = "give uint8, height x width, or x 1, 3 or 4"
KINDS = "give a path, bytes, a PIL image or an array"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """A picture that is read once. What the model makes of it is kept by the engine: further questions about the same
    picture are cheap, with or without this."""

    data: bytes = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)


def file_of(image: Any) -> bytes:
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        return _read(os.fsdecode(image))
    if not hasattr(image, "save") and hasattr(image, "__array_interface__"):  # which PIL images decode themselves for
        image = _from_array(image)
    if not hasattr(image, "save") or not hasattr(image, "convert"):
        raise RequestError("image", f"{type(image).__name__} is not a picture; {KINDS}")
    buffer = io.BytesIO()
    try:
        image.convert("RGB").save(buffer, "PNG", compress_level=1)
    except (OSError, ValueError) as error:
        raise RequestError("image", f"the PIL image cannot be read ({error}); {KINDS}") from error
    return buffer.getvalue()


def _read(name: str) -> bytes:
    kind, has_colon, rest = name.partition(":")
    if has_colon and kind.lower() in ("http", "https"):
        raise RequestError(
            "image", f"{shown(name)} is a web address, and only files are read here; download it and give its path"
        )
    if has_colon and kind.lower() == "data":
        return _from_data_url(rest)
    path = Path(os.path.expanduser(name))
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError("image", f"{shown(str(path))} cannot be read ({reason}); give a picture") from error


def _from_data_url(rest: str) -> bytes:
    opening, _, digits = rest.partition(",")
    try:
        if not opening.endswith(";base64"):
            raise ValueError
        return base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("image", "is a data URL without a file in base64; give data:image/png;base64,…") from None


def _from_array(given: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - files need neither
    from PIL import Image  # noqa: PLC0415

    array = np.asarray(given)
    is_picture = array.ndim in (2, 3) and array.size > 0 and (array.ndim == 2 or array.shape[2] in (1, 3, 4))
    if array.dtype != np.uint8 or not is_picture:
        raise RequestError("image", f"an array of {array.dtype} and shape {array.shape} is not a picture; {ARRAYS}")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
