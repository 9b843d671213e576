"""One training run of kestrel-tiny, from a folder to a folder: `python -m kestrel.train.run --folder out/tiny`.

A run starts from the folder's weights if it has any, trains on the next unseen seeds and writes weights, curves and
`progress.json` back. The recipe is a sequence of such runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kestrel.models.weight_files import open_checkpoint
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.weights import load_moondream
from kestrel.train.courses import EVERYTHING, Course, named_courses
from kestrel.train.curves import CurveWriter, draw_curves
from kestrel.train.feed import ExampleFeed, FeedPlan
from kestrel.train.loop import Batch, StepReport, TrainingPlan, train
from kestrel.train.objective import TaskTensors
from kestrel.train.prefetch import Prefetcher
from kestrel.train.saving import save_folder
from kestrel.train.scenes.atlas import SpriteAtlas, load_or_build_atlas
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.tasks.outline_book import path_book
from kestrel.train.tasks.prompt_format import PromptFormat
from kestrel.train.tiny import initialise, tiny_config
from kestrel.train.tokenizer import build_tokenizer, prompt_format

PROGRESS = "progress.json"


@dataclass(frozen=True)
class TinyRun:
    """What one run does."""

    folder: Path
    steps: int
    batch_size: int = 128
    tasks_per_scene: int = 14
    length: int = 294  # 730 + 294 = 1024 positions a scene
    sizes: tuple[tuple[int, int], ...] = ((378, 378),)
    courses: tuple[Course, ...] = (EVERYTHING,)
    lr: float = 1e-3
    final_lr: float = 1e-3
    warmup_steps: int = 200
    seed: int = 0
    workers: int = 4
    max_seconds: float = math.inf
    orthogonal: bool = True
    ema_decay: float = 0.999
    device: str = "auto"
    shards: int = 1
    atlas: Path = Path("out/atlas.npz")


@dataclass(frozen=True)
class Progress:
    """What earlier runs did; seeds below `next_seed` have been seen."""

    next_seed: int = 0
    scenes: int = 0
    seconds: float = 0.0
    runs: int = 0


def run(options: TinyRun, report: Callable[[StepReport], None]) -> Progress:
    device = chosen_device(options.device)
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        torch.set_num_threads(1)  # the cores belong to the feed; what is left here are tiny operations
    atlas = load_or_build_atlas(options.atlas)
    progress = read_progress(options.folder)
    model, tokenizer_json = start_model(options, device)
    plan = feed_plan(options, prompt_format(tokenizer_json, model.config.tokenizer), atlas, progress.next_seed)
    seconds = 0.0

    def keep_time(line: StepReport) -> None:
        nonlocal seconds
        seconds = line.seconds
        report(line)

    curves = options.folder / "curves.csv"
    with (
        feeding(plan, options.workers) as feed,
        Prefetcher(drawn(feed, atlas, device), batch_tensors, device) as batches,
    ):
        training = training_plan(options, device)
        scenes = train(model, iter(batches), training, CurveWriter(curves), keep_time, progress.scenes)
    seen = scenes - progress.scenes
    done = Progress(progress.next_seed + seen, scenes, progress.seconds + seconds, progress.runs + 1)
    save_folder(model, options.folder, tokenizer_json, shards=options.shards)
    (options.folder / PROGRESS).write_text(json.dumps(asdict(done), indent=1))
    if curves.exists():
        draw_curves(curves, options.folder / "curves.png")
    return done


def feed_plan(options: TinyRun, prompts: PromptFormat, atlas: SpriteAtlas, start_seed: int) -> FeedPlan:
    return FeedPlan(
        prompt_format=prompts,
        outlines=path_book(atlas),
        start_seed=start_seed,
        batch_size=options.batch_size,
        sizes=options.sizes,
        courses=options.courses,
        tasks_per_scene=options.tasks_per_scene,
        length=options.length,
    )


def training_plan(options: TinyRun, device: torch.device) -> TrainingPlan:
    return TrainingPlan(
        steps=options.steps,
        lr=options.lr,
        final_lr=options.final_lr,
        warmup_steps=options.warmup_steps,
        max_seconds=options.max_seconds,
        ema_decay=options.ema_decay,
        orthogonal=options.orthogonal,
        compile=device.type == "cuda",
    )


@contextmanager
def feeding(plan: FeedPlan, workers: int) -> Iterator[ExampleFeed]:
    """A feed whose workers are stopped outright at the end: nothing they still make is wanted."""
    earlier = set(multiprocessing.active_children())
    feed = ExampleFeed(plan, workers)
    try:
        yield feed
    finally:
        for process in set(multiprocessing.active_children()) - earlier:
            process.terminate()


def start_model(options: TinyRun, device: torch.device) -> tuple[MoondreamModel, str]:
    """The folder's model, or a fresh one; fp32 for training."""
    config_path, tokenizer_path = options.folder / "config.json", options.folder / "tokenizer.json"
    if config_path.exists():
        config = MoondreamConfig.from_dict(json.loads(config_path.read_text()))
        with open_checkpoint(options.folder) as checkpoint:
            model = load_moondream(checkpoint, config, device, torch.float32)
        return model.requires_grad_(True), tokenizer_path.read_text()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer_json, ids = build_tokenizer(options.seed)
    vocab_size = -(-len(json.loads(tokenizer_json)["model"]["vocab"]) // 64) * 64
    model = MoondreamModel(tiny_config(vocab_size, ids))
    return initialise(model, options.seed).to(device), tokenizer_json


def drawn(feed: ExampleFeed, atlas: SpriteAtlas, device: torch.device) -> Iterator[Batch]:
    textures = upload_atlas(atlas, device)
    for scenes, packed in feed:
        yield draw_batch(scenes, textures), TaskTensors.upload(packed, device)


def batch_tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch[0], *batch[1].tensors()]


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def read_progress(folder: Path) -> Progress:
    path = folder / PROGRESS
    return Progress(**json.loads(path.read_text())) if path.exists() else Progress()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=TinyRun.batch_size)
    parser.add_argument("--tasks-per-scene", type=int, default=TinyRun.tasks_per_scene)
    parser.add_argument("--length", type=int, default=TinyRun.length, help="positions for tasks behind each picture")
    parser.add_argument("--sizes", nargs="+", default=["378x378"], help="picture sizes, HEIGHTxWIDTH")
    parser.add_argument("--courses", nargs="+", default=["everything=1"], help="what is shown and asked, NAME=SHARE")
    parser.add_argument("--lr", type=float, default=TinyRun.lr)
    parser.add_argument("--final-lr", type=float, default=TinyRun.final_lr)
    parser.add_argument("--warmup-steps", type=int, default=TinyRun.warmup_steps)
    parser.add_argument("--workers", type=int, default=TinyRun.workers)
    parser.add_argument("--max-seconds", type=float, default=TinyRun.max_seconds)
    parser.add_argument("--orthogonal", action=argparse.BooleanOptionalAction, default=TinyRun.orthogonal)
    parser.add_argument("--ema-decay", type=float, default=TinyRun.ema_decay)
    parser.add_argument("--seed", type=int, default=TinyRun.seed)
    parser.add_argument("--device", default=TinyRun.device)
    parser.add_argument("--shards", type=int, default=TinyRun.shards)
    parser.add_argument("--atlas", type=Path, default=TinyRun.atlas)
    given = vars(parser.parse_args())
    sizes = tuple((int(h), int(w)) for h, w in (size.split("x") for size in given.pop("sizes")))
    shares = {name: float(share) for name, share in (course.split("=") for course in given.pop("courses"))}

    def show(line: StepReport) -> None:
        print(
            f"step {line.step:6d}  {line.scenes:9,d} scenes  {line.scenes_per_s:6.0f}/s  {line.seconds:5.0f} s  "
            f"text {line.text:.4f}  coord {line.coord:.3f}  size {line.size:.3f}  "
            f"balance {line.balance:.3f}  tokens right {line.token_accuracy:.4f}  waiting {line.waiting:.2f}",
            flush=True,
        )

    print(run(TinyRun(sizes=sizes, courses=named_courses(shares), **given), show))


if __name__ == "__main__":
    main()
