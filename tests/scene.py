"""The demo's scene in the size of one crop, and the truth about it.

Encoding its picture is most of what a test of the embedded model waits for, and the demo's own has nine crops.
"""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from kestrel.cli.demo import SCENE_SEED, SCENE_SIZE
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at

SCENE = Path(__file__).with_name("scene.png")
OBJECTS = scene_at(sample_batch(np.array([SCENE_SEED]), *SCENE_SIZE, HELD_OUT), 0).objects
BEES = [thing.box for thing in OBJECTS if thing.name == "bee"]


@lru_cache
def turned_scenes() -> tuple[bytes, ...]:
    """Eight pictures that answers tell apart: the scene turned and mirrored in every way."""
    with Image.open(SCENE) as scene:
        return (SCENE.read_bytes(), *(_png(scene.transpose(way)) for way in Image.Transpose))


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
