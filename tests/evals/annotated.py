"""A folder of annotated pictures whose truth is exact: the demo's scene, with all of its crosses, bees and its bus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from tests.scene import OBJECTS, SCENE

LABELS = ("cross", "bee", "bus", "lion")
TRUE = {label: [thing.box for thing in OBJECTS if thing.name == label] for label in LABELS}
NUM_TRUE = sum(map(len, TRUE.values()))


def coco() -> dict[str, Any]:
    with Image.open(SCENE) as picture:
        width, height = picture.size
    boxes = [(label, box) for label in LABELS for box in TRUE[label]]
    return {
        "images": [{"id": 1, "file_name": "scene.png", "width": width, "height": height}],
        "categories": [{"id": number, "name": label} for number, label in enumerate(LABELS)],
        "annotations": [
            {
                "id": number,
                "image_id": 1,
                "category_id": LABELS.index(label),
                "bbox": [x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height],
            }
            for number, (label, (x0, y0, x1, y1)) in enumerate(boxes)
        ],
    }


def annotated_folder(folder: Path) -> Path:
    """As `kestrel train adapter` reads it."""
    (folder / "images").mkdir(parents=True)
    shutil.copy(SCENE, folder / "images" / "scene.png")
    (folder / "annotations.json").write_text(json.dumps(coco()))
    return folder
