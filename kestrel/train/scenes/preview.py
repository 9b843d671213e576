"""A contact sheet of scenes with their boxes: python -m kestrel.train.scenes.preview --n 12 --out out/preview.png"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kestrel.train.options import DEFAULT_ATLAS_PATH
from kestrel.train.scenes.atlas import SpriteAtlas, load_or_build_atlas
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import PRESETS, SceneDifficulty, sample_batch, scene_at
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.scenes.truth import Scene

GAP_PX = 6
CAPTION_PX = 16
COLUMNS = 4


def contact_sheet(
    atlas: SpriteAtlas,
    seeds: Sequence[int],
    size: tuple[int, int],
    difficulty: SceneDifficulty,
    with_boxes: bool = True,
) -> Image.Image:
    height, width = size
    batch = sample_batch(np.array(seeds), height, width, difficulty)
    pictures = draw_batch(batch, upload_atlas(atlas)).numpy()
    columns = min(COLUMNS, len(seeds))
    cell = width + GAP_PX, height + CAPTION_PX + GAP_PX
    sheet = Image.new("RGB", (columns * cell[0], math.ceil(len(seeds) / columns) * cell[1]), "white")
    for index, pixels in enumerate(pictures):
        corner = index % columns * cell[0], index // columns * cell[1]
        picture = Image.fromarray(pixels)
        scene = scene_at(batch, index)
        if with_boxes:
            _draw_boxes(picture, scene)
        sheet.paste(picture, corner)
        caption = f"seed {scene.seed}: {len(scene.objects)} on {scene.background}"
        ImageDraw.Draw(sheet).text((corner[0] + 2, corner[1] + height + 1), caption, "black", ImageFont.load_default())
    return sheet


def _draw_boxes(picture: Image.Image, scene: Scene) -> None:
    pen = ImageDraw.Draw(picture)
    for thing in scene.objects:
        x_min, y_min, x_max, y_max = thing.box
        edges = (
            round(x_min * scene.width) - 1,
            round(y_min * scene.height) - 1,
            round(x_max * scene.width),
            round(y_max * scene.height),
        )
        pen.rectangle(edges, outline="magenta")
        label = " ".join(part for part in (thing.colour, thing.name, thing.text) if part)
        pen.text((edges[0], max(0, edges[1] - 11)), label, "magenta", ImageFont.load_default())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=12, help="number of scenes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first scene")
    parser.add_argument("--height", type=int, default=378)
    parser.add_argument("--width", type=int, default=378)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="normal")
    parser.add_argument("--no-boxes", action="store_true", help="draw the pictures as the model sees them")
    parser.add_argument("--atlas", type=Path, default=DEFAULT_ATLAS_PATH, help="built there when missing")
    parser.add_argument("--out", type=Path, default=Path("out/preview.png"))
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error(f"argument --n: must be at least 1 (got {options.n})")
    sheet = contact_sheet(
        load_or_build_atlas(options.atlas),
        range(options.seed, options.seed + options.n),
        (options.height, options.width),
        PRESETS[options.preset],
        with_boxes=not options.no_boxes,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.out)
    print(f"{options.n} scenes in {options.out}")


if __name__ == "__main__":
    main()
