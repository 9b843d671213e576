"""Pictures named on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from kestrel.config import RuntimeConfig
from kestrel.engine.pools import PicturePool
from kestrel.errors import RequestError, shown
from kestrel.images.rgb import RgbImage

STDIN = "-"
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif")


def is_file(text: str) -> bool:
    """Whether a word of the command line names a file; a long question does not."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def looks_like_picture(text: str) -> bool:
    """Whether a word of the command line is the path of a picture rather than a question, be it there or not."""
    if text.endswith("?"):
        return False
    has_ending = Path(text).suffix.lower() in PICTURE_ENDINGS
    has_folder = any(separator in text for separator in (os.sep, os.altsep) if separator)
    has_blanks = any(character.isspace() for character in text)
    return (has_ending and has_folder) if has_blanks else (has_ending or has_folder)


def refuse_path_as_question(name: str, text: str, remedy: str) -> None:
    """A picture where a question belongs: one that is there, or the path of one that is not."""
    if is_file(text):
        raise RequestError(name, f"{text} is a file, not a question; {remedy}")
    if looks_like_picture(text):
        raise RequestError(name, f"{shown(text)} looks like a picture, and there is no such file; check the path")


async def read_picture(source: str, config: RuntimeConfig) -> RgbImage:
    return (await read_pictures([source], config))[source]


async def read_pictures(sources: Iterable[str], config: RuntimeConfig) -> dict[str, RgbImage]:
    """Decoded pictures by source, each read once, under the configuration's limits.

    Read before a model is loaded, so that a wrong path is reported at once.
    """
    names = list(dict.fromkeys(sources))
    for name in names:
        if name != STDIN and not is_file(os.path.expanduser(name)):
            raise RequestError("image", f"there is no file {shown(name)}; give the path of a picture, or - for stdin")
    pool = PicturePool(config)
    try:
        found = await pool.decode("command line", [_from_stdin(config) if name == STDIN else name for name in names])
    finally:
        pool.close()
    pictures = [picture for picture in found if isinstance(picture, RgbImage)]  # all: there is no model to reduce for
    return dict(zip(names, pictures, strict=True))


def _from_stdin(config: RuntimeConfig) -> bytes:
    if sys.stdin.isatty():
        raise RequestError("image", "- reads a picture from stdin, but nothing is piped in; give a file instead")
    return sys.stdin.buffer.read(config.max_image_bytes + 1)
