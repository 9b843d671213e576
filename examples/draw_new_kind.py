"""Draws training data for an object that kestrel-tiny has never seen: windmills among the things it knows.

    python examples/draw_new_kind.py out/windmills
    kestrel train adapter --data out/windmills --output windmill.safetensors
    python examples/score_adapter.py --data out/windmills --adapter windmill.safetensors

Writes train.jsonl (200 pictures) and test.jsonl (250 others, held out), every line a task with its exact truth. Half of
the pictures show windmills. Questions about known things are mixed in, so that learning one does not unlearn the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH, SpriteAtlas, load_or_build_atlas
from kestrel.train.scenes.difficulty import FIRST_HELD_OUT_SEED, SceneDifficulty
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.kinds import is_emoji, kind_index
from kestrel.train.scenes.placement import sample_batch, scene_at
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.scenes.truth import Scene, SceneBatch
from kestrel.train.tasks import counting, locating, naming, relations
from kestrel.train.tasks.answers import direct, yes_or_no
from kestrel.train.tasks.example import Piece, TaskExample
from kestrel.train.tasks.outline_book import path_book
from kestrel.train.tasks.view import Group, SceneView
from kestrel.train.tasks.world import TaskWorld, task_world

NAME, PLURAL = "windmill", "windmills"
PLACE = kind_index("camera")  # whose place in the sprites the new kind takes; these pictures show no cameras
SIDE_PX, SPRITE_PX, SMOOTH = 378, 128, 4
DIFFICULTY = SceneDifficulty(max_objects=8, min_scale=0.08, text_probability=0.15)
KNOWN = (
    counting.count,
    counting.presence,
    locating.point,
    locating.detect,
    naming.what,
    naming.colour,
    relations.where,
)


def windmill() -> np.ndarray:
    """[height, width, 4], colours multiplied by alpha: a tower with a door, a red cap and four sails."""
    side = SPRITE_PX * SMOOTH
    picture = Image.new("RGBA", (side, side))
    pen = ImageDraw.Draw(picture)

    def polygon(colour: str, *corners: tuple[float, float]) -> None:
        pen.polygon([(x * side, y * side) for x, y in corners], fill=colour)

    polygon("#d8c3a5", (0.38, 0.42), (0.62, 0.42), (0.72, 1.0), (0.28, 1.0))
    polygon("#6b3e26", (0.44, 1.0), (0.44, 0.80), (0.56, 0.80), (0.56, 1.0))
    polygon("#c0392b", (0.34, 0.44), (0.5, 0.22), (0.66, 0.44))
    hub, reach, breadth = 0.40, 0.40, 0.13
    for dx, dy in ((1, -1), (1, 1), (-1, 1), (-1, -1)):
        end = 0.5 + reach * dx, hub + reach * dy
        polygon("#5d6d7e", (0.5, hub), end, (end[0] - breadth * dx, end[1]), (0.5 - 0.02 * dx, hub + 0.02 * dy))
        polygon("#ecf0f1", (0.5 + 0.08 * dx, hub + 0.1 * dy), end, (end[0] - breadth * dx, end[1]))
    pen.ellipse([side * 0.45, side * (hub - 0.05), side * 0.55, side * (hub + 0.05)], fill="#34495e")
    picture = picture.crop(picture.getbbox()).resize((SPRITE_PX, SPRITE_PX), Image.Resampling.BOX)
    pixels = np.asarray(picture, np.uint16)
    return np.concatenate([pixels[..., :3] * pixels[..., 3:] // 255, pixels[..., 3:]], axis=-1).astype(np.uint8)


def with_windmill(atlas: SpriteAtlas) -> SpriteAtlas:
    sprites = list(atlas.sprites)
    sprites[PLACE] = windmill()
    return replace(atlas, sprites=tuple(sprites))


def put_windmills(batch: SceneBatch) -> None:
    """In every second scene the emoji of one kind become windmills; nowhere else is the new kind."""
    for row, kinds in enumerate(batch.kind):
        kinds[kinds == PLACE] = kind_index("clock")
        emoji = sorted({int(kind) for kind in kinds if is_emoji(kind)})
        if emoji and batch.seeds[row] % 2 == 0:
            kinds[kinds == Random(int(batch.seeds[row])).choice(emoji)] = PLACE


def new_world(atlas: SpriteAtlas) -> TaskWorld:
    known = task_world(path_book(atlas))
    plurals = {name: plural for name, plural in known.plurals.items() if name != "camera"}
    return replace(known, plurals={**plurals, NAME: PLURAL})


def renamed(scene: Scene) -> Scene:
    objects = (replace(thing, name=NAME) if thing.kind == PLACE else thing for thing in scene.objects)
    return replace(scene, objects=tuple(objects))


def tasks_about(view: SceneView, num_known: int) -> Iterator[TaskExample]:
    """Four tasks about windmills, whether there are any or not, and some of the known ones."""
    rng = Random(view.scene.seed)
    group = next((each for each in view.by_name if each.singular == NAME), Group(NAME, PLURAL))
    yield direct("presence", counting.is_there(rng, group), yes_or_no(len(group) > 0))
    yield direct("count", counting.how_many(rng, group), str(len(group)))
    yield TaskExample("point", "point", {"object": NAME}, locating.points(group.objects))
    yield TaskExample("detect", "detect", {"object": NAME}, locating.boxes(group.objects))
    for _ in range(num_known):
        example = rng.choice(KNOWN)(view, rng)
        if example is not None:
            yield example


def as_line(example: TaskExample, image: str) -> str:
    """In the data format of `kestrel train adapter`."""
    asked = {key: value for key, value in example.fields.items() if key != "reasoning"}
    numbers = [value for piece in example.target for value in numbers_of(piece)]
    if example.skill == "point":
        said: dict[str, Any] = {"points": [numbers[i : i + 2] for i in range(0, len(numbers), 2)]}
    elif example.skill == "detect":
        boxes = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
        edges = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in boxes]
        said = {"boxes": [[min(max(value, 0.0), 1.0) for value in box] for box in edges]}
    else:
        said = {"answer": "".join(piece for piece in example.target if isinstance(piece, str))}
    return json.dumps({"image": image, **asked, **said}) + "\n"


def numbers_of(piece: Piece) -> list[float]:
    if isinstance(piece, SizeToken):
        return [piece.width, piece.height]
    return [piece.value] if isinstance(piece, CoordToken) else []


def draw(folder: Path, part: str, seeds: np.ndarray, atlas: SpriteAtlas) -> list[tuple[str, bool]]:
    """Pictures in the folder; their lines, and whether each is about windmills."""
    textures, world = upload_atlas(atlas), new_world(atlas)
    lines: list[tuple[str, bool]] = []
    for some in np.array_split(seeds, max(1, len(seeds) // 50)):
        batch = sample_batch(some, SIDE_PX, SIDE_PX, DIFFICULTY)
        put_windmills(batch)
        for row, pixels in enumerate(draw_batch(batch, textures).numpy()):
            image = f"{part}/{row + some[0] - seeds[0]:03d}.png"
            Image.fromarray(pixels).save(folder / image)
            for example in tasks_about(SceneView(renamed(scene_at(batch, row)), world), num_known=6):
                line = as_line(example, image)
                lines.append((line, NAME in line))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=200, help="pictures to learn from")
    parser.add_argument("--test", type=int, default=250, help="held-out pictures")
    parser.add_argument("--atlas", type=Path, default=DEFAULT_ATLAS_PATH, help="built there when missing")
    args = parser.parse_args(argv)
    atlas = with_windmill(load_or_build_atlas(args.atlas))
    for part, first, count in (("train", 0, args.train), ("test", FIRST_HELD_OUT_SEED, args.test)):
        (args.folder / part).mkdir(parents=True, exist_ok=True)
        lines = draw(args.folder, part, np.arange(first, first + count), atlas)
        files = (
            {"train": [line for line, _ in lines]}
            if part == "train"
            else {
                "test": [line for line, is_new in lines if is_new],
                "known": [line for line, is_new in lines if not is_new],
            }
        )
        for name, chosen in files.items():
            (args.folder / f"{name}.jsonl").write_text("".join(chosen), encoding="utf-8")
            print(f"{args.folder / name}.jsonl: {len(chosen)} tasks about {count} pictures")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
