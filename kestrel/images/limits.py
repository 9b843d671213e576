"""How large a picture may be, and the refusals for one that is larger."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import RequestError

MAX_SIDE_PX = 65_535
"""Longest side of any picture: what JPEG can hold, and a bound for the memory that resizing a sliver needs."""


@dataclass(frozen=True)
class ImageLimits:
    """What the decoder accepts. Sizes are checked before any pixel is decoded."""

    max_pixels: int
    """Largest height times width."""
    max_bytes: int
    """Largest encoded picture."""
    honour_exif: bool = True
    """Turn encoded pictures upright by their EXIF orientation tag."""

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise RequestError(
                "image",
                f"the encoded picture has {num_bytes} bytes, the limit is {self.max_bytes}; "
                "send a smaller file or raise max_image_bytes",
            )

    def check_size(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise RequestError("image", f"the picture is empty ({width}x{height} pixels); send at least one pixel")
        if max(height, width) > MAX_SIDE_PX:
            raise RequestError(
                "image", f"the picture has {width}x{height} pixels, no side may exceed {MAX_SIDE_PX}; cut it into parts"
            )
        if height * width > self.max_pixels:
            raise RequestError(
                "image",
                f"the picture has {width}x{height} = {height * width} pixels, the limit is {self.max_pixels}; "
                "send a smaller picture or raise max_image_pixels",
            )
