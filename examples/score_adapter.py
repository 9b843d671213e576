"""How often the base model and the base with an adapter are right about held-out tasks, side by side.

    python examples/score_adapter.py --data out/windmills --adapter windmill.safetensors

Reads test.jsonl (the new task) and known.jsonl (what must not be forgotten) of the folder, in the format of
`kestrel train adapter`. Both answer in the same batches of one engine. With `--alone` the base answers once more in an
engine without adapters, and it is counted how many of its answers are the same to the bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.evals.metrics import Matches, PrecisionRecall, match_boxes, match_points

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


async def ask(engine: InferenceEngine, row: Row, data: Path, adapter: str | None) -> dict[str, Any]:
    image = data / row["image"]
    if "answer" in row:
        return (await engine.query(image, row["question"], reasoning=False, settings={"adapter": adapter})).output
    locate = engine.point if "points" in row else engine.detect
    return (await locate(image, row["object"], settings={"max_objects": 48, "adapter": adapter})).output


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


async def all_answers(
    config: RuntimeConfig, rows: Sequence[Row], data: Path, adapters: Sequence[str | None]
) -> list[list[dict[str, Any]]]:
    """For each row what each of the adapters says, all of them mixed."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def answers(engine: InferenceEngine, row: Row) -> list[dict[str, Any]]:
        async with gate:
            return list(await asyncio.gather(*(ask(engine, row, data, adapter) for adapter in adapters)))

    async with await InferenceEngine.create(config) as engine:
        return list(await asyncio.gather(*(answers(engine, row) for row in rows)))


async def compare(args: argparse.Namespace) -> None:
    files = {name: read_rows(args.data, name)[: args.limit] for name in ("test", "known")}
    rows = [(name, row) for name, of_file in files.items() for row in of_file]
    plain = RuntimeConfig(model_path=args.model_path)
    config = replace(plain, adapter_dir=args.adapter.parent, max_adapter_rank=512, max_adapters=1)
    said = await all_answers(config, [row for _, row in rows], args.data, (None, args.adapter.stem))
    scores: list[Scores] = [defaultdict(PrecisionRecall), defaultdict(PrecisionRecall)]
    for (name, row), both in zip(rows, said, strict=True):
        for side, output in zip(scores, both, strict=True):
            side[name, kind_of(row)].add(judged(row, output))
    for name, of_file in files.items():
        print(f"{name}.jsonl: {len(of_file)} tasks about {len({row['image'] for row in of_file})} pictures")
        for key in sorted(key for key in scores[0] if key[0] == name):
            base, adapted = (side[key] for side in scores)
            print(f"  {key[1]:24s} of {base.true:4d}   base {base.f1:.3f}   adapter {adapted.f1:.3f}")
    if args.alone:
        alone = await all_answers(plain, [row for _, row in rows], args.data, (None,))
        same = sum(mixed[0] == single[0] for mixed, single in zip(said, alone, strict=True))
        print(f"{same} of {len(rows)} answers of the base are the same without the adapter beside it")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--model-path", type=Path, help="base model; the embedded one when left out")
    parser.add_argument("--limit", type=int, help="only so many tasks of each file")
    parser.add_argument("--alone", action="store_true", help="ask the base again in an engine of its own")
    asyncio.run(compare(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
