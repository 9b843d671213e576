"""Pictures named on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from kestrel.config import RuntimeConfig
from kestrel.engine.images import PicturePool
from kestrel.errors import RequestError, shown
from kestrel.images.rgb import RgbImage

STDIN = "-"


def is_file(text: str) -> bool:
    """Whether a word of the command line names a file; a long question does not."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


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
        pictures = await pool.decode("command line", [_from_stdin(config) if name == STDIN else name for name in names])
    finally:
        pool.close()
    return dict(zip(names, pictures, strict=True))


def _from_stdin(config: RuntimeConfig) -> bytes:
    if sys.stdin.isatty():
        raise RequestError("image", "- reads a picture from stdin, but nothing is piped in; give a file instead")
    return sys.stdin.buffer.read(config.max_image_bytes + 1)
