"""Draws the scenes of docs/gallery.md, asks the embedded model about them and writes the page with what it said.

python examples/make_gallery.py            (from the top of a checkout; needs the fonts of scripts/install-fonts)

The scenes are the first ones from a seed on that have at least three objects; nobody looked at answers to choose them.
An answer that the scene's truth contradicts is marked.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from PIL import Image

from kestrel.cli.drawing import draw_result
from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from kestrel.evals.gallery import DRAWN, LEAST_OBJECTS, NUM_SCENES, GalleryScene, gallery_scenes, is_right
from kestrel.evals.questions import Question
from kestrel.images.decode import ImageLimits, decode_image
from kestrel.train.scenes.atlas import load_or_build_atlas

TOP = Path(__file__).parents[1]


async def ask(engine: InferenceEngine, scene: GalleryScene) -> list[EngineResult]:
    calls = [engine.run(q.skill, image=scene.pixels, temperature=0.0, **q.fields) for q in scene.questions]
    return list(await asyncio.gather(*calls))


def section(scene: GalleryScene, results: list[EngineResult], drawn_name: str) -> str:
    height, width = scene.pixels.shape[:2]
    lines = [
        f"## {scene.number}. {width} × {height}",
        "",
        f"![]({drawn_name})",
        "",
        "| asked | said | |",
        "|---|---|---|",
    ]
    for question, result in zip(scene.questions, results, strict=True):
        mark = "" if is_right(question, result.output) else "**wrong**"
        lines.append(f"| {asked(question)} | {said(result)} | {mark} |")
    return "\n".join(lines)


def asked(question: Question) -> str:
    fields = dict(question.fields)
    words = fields.get("question") or fields.get("object") or f"length {fields.get('length')}"
    thinking = ", thinking first" if fields.get("reasoning") else ""
    refs = fields.get("spatial_refs")
    place = "" if not refs else f" at {', '.join(f'{value:.2f}' for value in refs[0])}"
    return f"{question.skill}{thinking}: {words}{place}"


def said(result: EngineResult) -> str:
    output = result.output
    if result.skill == "point":
        return ", ".join(f"({p['x']:.2f}, {p['y']:.2f})" for p in output["points"]) or "nothing"
    if result.skill == "detect":
        corners = ("x_min", "y_min", "x_max", "y_max")
        return "; ".join(" ".join(f"{box[c]:.2f}" for c in corners) for box in output["objects"]) or "nothing"
    if result.skill == "segment":
        return "an outline, drawn above" if output["path"] else "nothing"
    thought = output.get("reasoning", {}).get("text")
    return f"*{thought}* {result.text}" if thought else result.text


def annotated(scene: GalleryScene, results: list[EngineResult]) -> Image.Image:
    picture = Image.fromarray(scene.pixels)
    for question, result in zip(scene.questions, results, strict=True):
        if question.skill in DRAWN:
            limits = ImageLimits(max_pixels=picture.width * picture.height, max_bytes=1)
            picture = draw_result(decode_image(picture, limits), result.output, question.fields["object"])
    return picture


INTRODUCTION = f"""# Gallery

See here what `kestrel-tiny`, the embedded model, can do and where it fails: drawn scenes, and what it said about
them (greedy, fp32, on a CPU). `python examples/make_gallery.py` wrote this page. The scenes are the first {NUM_SCENES}
with at least {LEAST_OBJECTS} objects from a held-out seed on, and the questions are drawn at random: no miss was
left out, and each is marked **wrong**. The plain pictures are in
[examples/images](../examples/images): try `kestrel query examples/images/06.png 'What is in the picture?'`.
"""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atlas", type=Path, default=Path("out/atlas.npz"), help="sprites, built when missing")
    parser.add_argument("--to", type=Path, default=TOP, help="folder that gets docs/ and examples/")
    args = parser.parse_args()
    images, drawings = args.to / "examples" / "images", args.to / "docs" / "gallery"
    for folder in (images, drawings):
        folder.mkdir(parents=True, exist_ok=True)
    sections = [INTRODUCTION]
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=1024)) as engine:
        for scene in gallery_scenes(load_or_build_atlas(args.atlas)):
            results = await ask(engine, scene)
            name = f"{scene.number:02d}"
            Image.fromarray(scene.pixels).quantize(256).save(images / f"{name}.png", optimize=True)
            annotated(scene, results).save(drawings / f"{name}.webp", quality=80)
            sections.append(section(scene, results, f"gallery/{name}.webp"))
            print(f"{name}: {sum(is_right(q, r.output) for q, r in zip(scene.questions, results, strict=True))}"
                  f" of {len(results)} right")  # fmt: skip
    (args.to / "docs" / "gallery.md").write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
