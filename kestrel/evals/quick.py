"""A quick look at a model folder on held-out scenes, through the engine: `python -m kestrel.evals.quick --folder …`.

Scores by task family: the share of exact answers for words and numbers, F1 of points and boxes, overlap of outlines.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import RequestError
from kestrel.evals.metrics import Box, CharacterErrors, Matches, PrecisionRecall, box_iou, match_boxes, match_points
from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.scenes.atlas import load_or_build_atlas
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.scenes.truth import Scene
from kestrel.train.tasks.example import Apart, SpecialToken, TaskExample
from kestrel.train.tasks.mix import TaskMix, sample_tasks
from kestrel.train.tasks.view import path_book, task_world

FIRST_SEED = 10**12
_DRAWN_AT_ONCE = 32


@dataclass
class FamilyScore:
    asked: int = 0
    right: int = 0
    found: PrecisionRecall = field(default_factory=PrecisionRecall)
    overlaps: list[float] = field(default_factory=list)
    spelling: CharacterErrors = field(default_factory=CharacterErrors)


@dataclass(frozen=True)
class AskedTask:
    scene: Scene
    pixels: np.ndarray
    example: TaskExample


def make_tasks(num_scenes: int, size: tuple[int, int], tasks_per_scene: int, atlas_path: Path) -> list[AskedTask]:
    """Held-out scenes, drawn, and what to ask about them."""
    atlas = load_or_build_atlas(atlas_path)
    textures, world = upload_atlas(atlas), task_world(path_book(atlas))
    tasks: list[AskedTask] = []
    for first in range(0, num_scenes, _DRAWN_AT_ONCE):
        count = min(_DRAWN_AT_ONCE, num_scenes - first)
        batch = sample_batch(FIRST_SEED + np.arange(first, first + count), *size, HELD_OUT)
        pictures = draw_batch(batch, textures).numpy()
        for row in range(count):
            scene = scene_at(batch, row)
            examples = sample_tasks(scene, Random(scene.seed), TaskMix(), tasks_per_scene, world)
            tasks += [AskedTask(scene, pictures[row], example) for example in examples]
    return tasks


async def evaluate(config: RuntimeConfig, tasks: list[AskedTask]) -> dict[str, FamilyScore]:
    scores: dict[str, FamilyScore] = defaultdict(FamilyScore)
    gate = asyncio.Semaphore(4 * config.max_batch_size)

    async def ask(engine: InferenceEngine, task: AskedTask) -> None:
        picture = {"image": task.pixels} if task.example.sees_image else {}
        fields = {name: value for name, value in task.example.fields.items() if value is not None}
        async with gate:
            try:
                result = await engine.run(task.example.skill, **picture, **fields, settings={"temperature": 0.0})
                output = result.output
            except RequestError:
                output = {}
        score(scores[task.example.family], task, output)

    async with await InferenceEngine.create(config) as engine:
        await asyncio.gather(*(ask(engine, task) for task in tasks))
    return scores


def score(family: FamilyScore, task: AskedTask, output: dict[str, Any]) -> None:
    family.asked += 1
    match task.example.skill:
        case "query":
            answer, truth = str(output.get("answer", "")).strip(), wanted_text(task.example)
            family.right += answer == truth
            family.spelling.add(answer, truth)
        case "caption":
            family.right += str(output.get("caption", "")).strip() == wanted_text(task.example)
        case "point":
            points = [(point["x"], point["y"]) for point in output.get("points", [])]
            matches = match_points(points, true_boxes(task))
            family.right += matches.num_matched == matches.num_predicted == matches.num_true
            family.found.add(matches)
        case "detect":
            boxes = [_box(each) for each in output.get("objects", [])]
            true = true_boxes(task)
            overlaps = [overlap for overlap in match_boxes(boxes, true) if overlap > 0]
            family.right += len(overlaps) == len(boxes) == len(true)
            family.found.add(Matches(len(overlaps), len(boxes), len(true)))
            family.overlaps += overlaps
        case "segment":
            true = true_boxes(task)
            bbox = output.get("bbox")
            overlap = box_iou(_box(bbox), true[0]) if true and bbox else float(not true and not bbox)
            family.overlaps.append(overlap)
            family.right += overlap >= 0.5


def wanted_text(example: TaskExample) -> str:
    """What a query or caption should say; of a thought only what follows it."""
    pieces = list(example.target)
    mark = SpecialToken("answer")
    said = pieces[pieces.index(mark) + 1 :] if mark in pieces else pieces
    return "".join("".join(piece.pieces) if isinstance(piece, Apart) else str(piece) for piece in said).strip()


def true_boxes(task: AskedTask) -> list[Box]:
    """The boxes of the objects that the target points at."""
    values = [piece for piece in task.example.target if isinstance(piece, CoordToken | SizeToken)]
    coords = [piece.value for piece in values if isinstance(piece, CoordToken)]
    centres = list(zip(coords[::2], coords[1::2], strict=True))
    return [_nearest(task.scene, centre) for centre in centres]


def _nearest(scene: Scene, centre: tuple[float, float]) -> Box:
    return min(scene.objects, key=lambda each: abs(each.x - centre[0]) + abs(each.y - centre[1])).box


def _box(values: dict[str, float]) -> Box:
    return (values["x_min"], values["y_min"], values["x_max"], values["y_max"])


def table(scores: dict[str, FamilyScore]) -> str:
    lines = [f"{'family':24s} {'n':>5s} {'exact':>6s} {'F1':>6s} {'IoU':>6s} {'CER':>6s}"]
    for name in sorted(scores):
        each = scores[name]
        f1 = f"{each.found.f1:.3f}" if each.found.true or each.found.predicted else ""
        iou = f"{np.mean(each.overlaps):.3f}" if each.overlaps else ""
        errors = f"{each.spelling.rate:.3f}" if each.spelling.characters else ""
        lines.append(f"{name:24s} {each.asked:5d} {each.right / each.asked:6.3f} {f1:>6s} {iou:>6s} {errors:>6s}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--tasks-per-scene", type=int, default=16)
    parser.add_argument("--size", default="378x378", help="HEIGHTxWIDTH of the pictures")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--atlas", type=Path, default=Path("out/atlas.npz"))
    given = parser.parse_args()
    height, width = (int(side) for side in given.size.split("x"))
    tasks = make_tasks(given.scenes, (height, width), given.tasks_per_scene, given.atlas)
    config = RuntimeConfig(
        model_path=given.folder, device=given.device, dtype=given.dtype, max_batch_size=given.batch, max_queue_size=8192
    )
    start = time.perf_counter()
    scores = asyncio.run(evaluate(config, tasks))
    print(table(scores))
    print(f"{len(tasks)} tasks about {given.scenes} scenes in {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
