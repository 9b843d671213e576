"""kestrel label on drawn scenes and a video of them: what it writes, judged by others' tools against exact truth."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.evals.metrics import Box, box_iou
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at
from kestrel.train.scenes.truth import Scene
from tests.labelling.videos import write_video
from tests.sprites import sprite_textures

from .conftest import ON_CPU, Kestrel

pytestmark = pytest.mark.exhaustive
FIRST_SEED = 7 * 10**12
SIDE = 378
LEAST_MAP50 = 0.95


def drawn(number: int) -> tuple[list[Scene], np.ndarray]:
    batch = sample_batch(FIRST_SEED + np.arange(number), SIDE, SIDE, HELD_OUT)
    return [scene_at(batch, row) for row in range(number)], draw_batch(batch, sprite_textures("cpu")).numpy()


def names_in(scene: Scene) -> list[str]:
    """Of things that are drawn; printed words and numbers are left out."""
    return sorted({thing.name for thing in scene.objects if thing.text is None})


def pixels_of(box: Box) -> Box:
    x0, y0, x1, y1 = (min(max(side, 0.0), 1.0) * SIDE for side in box)
    return x0, y0, x1, y1


def truth_of(scenes: Sequence[Scene], ours: dict[str, Any]) -> dict[str, Any]:
    """In COCO's form, with the numbers that our file gives pictures and classes."""
    images = {image["file_name"]: image["id"] for image in ours["images"]}
    classes = {category["name"]: category["id"] for category in ours["categories"]}
    annotations = []
    for index, scene in enumerate(scenes):
        for thing in scene.objects:
            if thing.text is None:
                x0, y0, x1, y1 = pixels_of(thing.box)
                box = [x0, y0, x1 - x0, y1 - y0]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": images[f"{index:03}.png"],
                        "category_id": classes[thing.name],
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                )
    return {**ours, "annotations": annotations}


def test_pycocotools_agrees_that_nearly_all_boxes_are_right(kestrel: Kestrel, tmp_path: Path) -> None:
    from pycocotools.coco import COCO  # noqa: PLC0415
    from pycocotools.cocoeval import COCOeval  # noqa: PLC0415

    scenes, pictures = drawn(40)
    rows = []
    for index, (scene, picture) in enumerate(zip(scenes, pictures, strict=True)):
        Image.fromarray(picture).save(tmp_path / f"{index:03}.png")
        rows.append({"image": f"{index:03}.png", "objects": [*names_in(scene), "dragon"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    told = kestrel("label", tmp_path / "rows.jsonl", "--output", output, "--objects", "dragon", *ON_CPU)
    assert told.code == 0, told.err
    ours = json.loads((output / "coco" / "annotations.json").read_bytes())
    (tmp_path / "truth.json").write_text(json.dumps(truth_of(scenes, ours)))
    with contextlib.redirect_stdout(io.StringIO()):
        judge = COCOeval(COCO(tmp_path / "truth.json"), COCO(output / "coco" / "annotations.json"), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    assert judge.stats[1] >= LEAST_MAP50, judge.stats


def test_frames_of_a_video_have_their_times_and_boxes(kestrel: Kestrel, tmp_path: Path) -> None:
    """Three scenes of a second each; at each change of scene a frame is taken."""
    scenes, pictures = drawn(3)
    frames = [(40 * number, pictures[number // 25]) for number in range(75)]
    video = write_video(tmp_path / "clip.mp4", frames)
    names = sorted({name for scene in scenes for name in names_in(scene)})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert kestrel("label", video, "--scenes", "--objects", ",".join(names), "--output", whole, *ON_CPU).code == 0
    rows = journal_rows(whole)
    assert [(row["frame"]["index"], row["frame"]["time_s"]) for row in rows] == [(0, 0.0), (25, 1.0), (50, 2.0)]
    for scene, row in zip(scenes, rows, strict=True):
        for thing in scene.objects:
            if thing.text is None:
                same = [found["box"] for found in row["found"] if found["label"] == thing.name]
                assert max(box_iou(tuple(box), thing.box) for box in same) > 0.5

    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[: video.stat().st_size * 2 // 3])
    told = kestrel("label", tmp_path / "cut.mp4", "--objects", names[0], "--output", cut, *ON_CPU)
    assert told.code == 0, told.err
    *good, damage = journal_rows(cut)
    assert [row["frame"]["time_s"] for row in good] == [0.0, 1.0][: len(good)]
    assert good
    assert "is damaged after frame" in damage["error"]


def journal_rows(output: Path) -> list[dict[str, Any]]:
    lines = (output / "journal.jsonl").read_bytes().splitlines()[1:]
    return sorted((json.loads(line)["record"] for line in lines), key=lambda row: row["key"])
