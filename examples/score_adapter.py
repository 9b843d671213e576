"""How often the base model and the base with an adapter are right about held-out tasks, side by side.

    python examples/score_adapter.py --data out/windmills --adapter windmill.safetensors

Reads test.jsonl (the new task) and known.jsonl (what must not be forgotten) of the folder, in the format of
`kestrel train adapter`. The adapter is built into a copy of the base, and both answer through the ordinary engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kestrel.adapters import load_adapter
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.evals.metrics import Matches, PrecisionRecall, match_boxes, match_points
from kestrel.families import load, resolve
from kestrel.moondream.lora import adapter_shape
from kestrel.moondream.spec import LoadedMoondream
from kestrel.train.adapter.merging import save_merged

NEAR = 0.03
"""How far from the truth a point may lie, by the picture's side."""
AT_ONCE = 16

Row = dict[str, Any]
Scores = dict[tuple[str, str], PrecisionRecall]
"""By file and kind of task."""


def read_rows(data: Path, name: str) -> list[Row]:
    path = data / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def kind_of(row: Row) -> str:
    if "points" in row or "boxes" in row:
        return "point F1" if "points" in row else "detect F1 at IoU 0.5"
    if row["answer"] in ("yes", "no"):
        return "is there: right"
    return "how many: right" if row["answer"].isdigit() else "other answers: right"


async def ask(engine: InferenceEngine, row: Row, data: Path) -> dict[str, Any]:
    image = data / row["image"]
    if "answer" in row:
        return (await engine.query(image, row["question"], reasoning=False)).output
    locate = engine.point if "points" in row else engine.detect
    return (await locate(image, row["object"], settings={"max_objects": 48})).output


def judged(row: Row, said: dict[str, Any]) -> Matches:
    """An answer is one prediction of one truth."""
    if "answer" in row:
        return Matches(int(said["answer"].strip() == row["answer"]), 1, 1)
    if "points" in row:
        near = [(x - NEAR, y - NEAR, x + NEAR, y + NEAR) for x, y in row["points"]]
        return match_points([(point["x"], point["y"]) for point in said["points"]], near)
    found = [(box["x_min"], box["y_min"], box["x_max"], box["y_max"]) for box in said["objects"]]
    overlaps = match_boxes(found, [tuple(box) for box in row["boxes"]])
    return Matches(sum(overlap > 0 for overlap in overlaps), len(found), len(row["boxes"]))


async def scores(config: RuntimeConfig, rows: Sequence[tuple[str, Row]], data: Path) -> Scores:
    found: Scores = defaultdict(PrecisionRecall)
    gate = asyncio.Semaphore(AT_ONCE)

    async def judge(engine: InferenceEngine, name: str, row: Row) -> None:
        async with gate:
            found[name, kind_of(row)].add(judged(row, await ask(engine, row, data)))

    async with await InferenceEngine.create(config) as engine:
        await asyncio.gather(*(judge(engine, name, row) for name, row in rows))
    return found


def merged_folder(base: RuntimeConfig, adapter: Path, folder: Path) -> Path:
    loaded = load(resolve(base), "cpu", torch.float32)
    assert isinstance(loaded, LoadedMoondream)
    save_merged(loaded, load_adapter(adapter, adapter_shape(loaded.config.text)), folder)
    return folder


async def compare(args: argparse.Namespace) -> None:
    base = RuntimeConfig(model_path=args.model_path)
    files = {name: read_rows(args.data, name)[: args.limit] for name in ("test", "known")}
    rows = [(name, row) for name, of_file in files.items() for row in of_file]
    with tempfile.TemporaryDirectory() as temporary:
        merged = RuntimeConfig(model_path=merged_folder(base, args.adapter, Path(temporary) / "merged"))
        before, after = await scores(base, rows, args.data), await scores(merged, rows, args.data)
    for name, of_file in files.items():
        print(f"{name}.jsonl: {len(of_file)} tasks about {len({row['image'] for row in of_file})} pictures")
        for key in sorted(key for key in before if key[0] == name):
            figures = f"base {before[key].f1:.3f}   adapter {after[key].f1:.3f}"
            print(f"  {key[1]:24s} of {before[key].true:4d}   {figures}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--model-path", type=Path, help="base model; the embedded one when left out")
    parser.add_argument("--limit", type=int, help="only so many tasks of each file")
    asyncio.run(compare(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
