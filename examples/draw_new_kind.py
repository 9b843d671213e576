"""Draws training data for an object that kestrel-tiny has never seen: windmills among the things it knows.

    python examples/draw_new_kind.py out/windmills
    kestrel train adapter --data out/windmills --output windmill.safetensors
    python examples/score_adapter.py --data out/windmills --adapter windmill.safetensors

Writes train.jsonl (200 pictures) and, about 250 held-out pictures, test.jsonl (windmills) and known.jsonl (the rest).
Half of the pictures show windmills. Known things are asked about as well, so that they are not forgotten.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.scenes.atlas import load_or_build_atlas
from kestrel.train.scenes.catalogue import is_emoji, kind_index
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import FIRST_HELD_OUT_SEED, SceneDifficulty, sample_batch, scene_at
from kestrel.train.scenes.textures import AtlasTensors, upload_atlas
from kestrel.train.scenes.truth import SceneBatch
from kestrel.train.tasks import locating, questions
from kestrel.train.tasks.example import Piece, TaskExample, direct, yes_or_no
from kestrel.train.tasks.view import Group, SceneView, TaskWorld, path_book, task_world

NAME, PLURAL = "windmill", "windmills"
REPLACED, INSTEAD = "camera", "clock"  # the sprite whose place the new kind takes, and what is drawn for it
SIDE_PX, SPRITE_PX = 378, 128
DIFFICULTY = SceneDifficulty(max_objects=8, min_scale=0.08, text_probability=0.15)
KNOWN = (questions.count, questions.presence, locating.point, locating.detect, questions.what, questions.colour)


def windmill() -> np.ndarray:
    """[height, width, 4], colours multiplied by alpha: a tower with a door, a red cap and four sails."""
    side = 4 * SPRITE_PX
    picture = Image.new("RGBA", (side, side))
    pen = ImageDraw.Draw(picture)

    def polygon(colour: str, *corners: tuple[float, float]) -> None:
        pen.polygon([(x * side, y * side) for x, y in corners], fill=colour)

    polygon("#d8c3a5", (0.38, 0.42), (0.62, 0.42), (0.72, 1.0), (0.28, 1.0))
    polygon("#6b3e26", (0.44, 1.0), (0.44, 0.80), (0.56, 0.80), (0.56, 1.0))
    polygon("#c0392b", (0.34, 0.44), (0.5, 0.22), (0.66, 0.44))
    for dx, dy in ((1, -1), (1, 1), (-1, 1), (-1, -1)):
        tip, corner = (0.5 + 0.4 * dx, 0.4 + 0.4 * dy), (0.5 + 0.27 * dx, 0.4 + 0.4 * dy)
        polygon("#5d6d7e", (0.5, 0.4), tip, corner, (0.5 - 0.02 * dx, 0.4 + 0.02 * dy))
        polygon("#ecf0f1", (0.5 + 0.08 * dx, 0.4 + 0.1 * dy), tip, corner)
    pen.ellipse([side * 0.45, side * 0.35, side * 0.55, side * 0.45], fill="#34495e")
    picture = picture.crop(picture.getbbox()).resize((SPRITE_PX, SPRITE_PX), Image.Resampling.BOX)
    values = np.asarray(picture, np.uint16)
    return np.concatenate([values[..., :3] * values[..., 3:] // 255, values[..., 3:]], axis=-1).astype(np.uint8)


def put_windmills(batch: SceneBatch) -> None:
    """In every second scene the emoji of one kind become windmills."""
    place = kind_index(REPLACED)
    for seed, kinds in zip(batch.seeds.tolist(), batch.kind, strict=True):
        kinds[kinds == place] = kind_index(INSTEAD)
        emoji = sorted({int(kind) for kind in kinds if is_emoji(kind)})
        if emoji and seed % 2 == 0:
            kinds[kinds == Random(seed).choice(emoji)] = place


def tasks_about(view: SceneView) -> Iterator[TaskExample]:
    """Four tasks about windmills, whether there are any or not, and some about what is known."""
    rng = Random(view.scene.seed)
    group = next((each for each in view.by_name if each.singular == NAME), Group(NAME, PLURAL))
    yield direct("presence", questions.is_there(rng, group), yes_or_no(len(group) > 0))
    yield direct("count", questions.how_many(rng, group), str(len(group)))
    yield TaskExample("point", "point", {"object": NAME}, locating.points(group.objects))
    yield TaskExample("detect", "detect", {"object": NAME}, locating.boxes(group.objects))
    known = (rng.choice(KNOWN)(view, rng) for _ in range(6))
    yield from (example for example in known if example is not None)


def as_line(example: TaskExample, image: str) -> str:
    """In the data format of `kestrel train adapter`."""
    line = {"image": image, **{key: value for key, value in example.fields.items() if key != "reasoning"}}
    numbers = [number for piece in example.target for number in numbers_of(piece)]
    if example.skill == "point":
        line["points"] = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    elif example.skill == "detect":
        line["boxes"] = [corners(*numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
    else:
        line["answer"] = "".join(piece for piece in example.target if isinstance(piece, str))
    return json.dumps(line) + "\n"


def numbers_of(piece: Piece) -> list[float]:
    if isinstance(piece, SizeToken):
        return [piece.width, piece.height]
    return [piece.value] if isinstance(piece, CoordToken) else []


def corners(x: float, y: float, width: float, height: float) -> list[float]:
    edges = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return [min(max(edge, 0.0), 1.0) for edge in edges]


def draw(folder: Path, part: str, seeds: np.ndarray, textures: AtlasTensors, world: TaskWorld) -> list[str]:
    """Saves pictures; returns their lines."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    batch = sample_batch(seeds, SIDE_PX, SIDE_PX, DIFFICULTY)
    put_windmills(batch)
    lines: list[str] = []
    for row, pixels in enumerate(draw_batch(batch, textures).numpy()):
        image = f"{part}/{row:03d}.png"
        Image.fromarray(pixels).save(folder / image)
        scene = scene_at(batch, row)
        things = tuple(replace(each, name=NAME) if each.name == REPLACED else each for each in scene.objects)
        view = SceneView(replace(scene, objects=things), world)
        lines += [as_line(example, image) for example in tasks_about(view)]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=200, help="pictures to learn from")
    parser.add_argument("--test", type=int, default=250, help="held-out pictures")
    parser.add_argument("--atlas", type=Path, help="sprites, built when missing; default: atlas.npz in the folder")
    args = parser.parse_args(argv)
    atlas, place = load_or_build_atlas(args.atlas or args.folder / "atlas.npz"), kind_index(REPLACED)
    atlas = replace(atlas, sprites=(*atlas.sprites[:place], windmill(), *atlas.sprites[place + 1 :]))
    textures, world = upload_atlas(atlas), task_world(path_book(atlas))
    world = replace(world, plurals={n: p for n, p in world.plurals.items() if n != REPLACED} | {NAME: PLURAL})
    train = draw(args.folder, "train", np.arange(args.train), textures, world)
    test = draw(args.folder, "test", FIRST_HELD_OUT_SEED + np.arange(args.test), textures, world)
    known = [line for line in test if NAME not in line]
    for name, lines in {"train": train, "test": [line for line in test if NAME in line], "known": known}.items():
        (args.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{args.folder / name}.jsonl: {len(lines)} tasks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
