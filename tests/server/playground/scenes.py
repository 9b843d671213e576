"""What the sample pictures show: truth from the scene generator, by the seeds they were drawn from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kestrel.server.playground.routes import FOLDER, SAMPLES
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at

Box = tuple[float, float, float, float]


def samples() -> list[dict[str, Any]]:
    return json.loads((FOLDER / SAMPLES).read_text())


def boxes_of(sample_file: str, name: str) -> list[Box]:
    """The true boxes of everything of that name in a sample."""
    sample = next(sample for sample in samples() if sample["file"] == sample_file)
    batch = sample_batch(np.array([sample["seed"]]), sample["height"], sample["width"], HELD_OUT)
    return [thing.box for thing in scene_at(batch, 0).objects if thing.name == name]
