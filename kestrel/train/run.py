"""One training run of kestrel-tiny, from a folder to a folder: what `kestrel train tiny` does.

A run starts from the folder's weights if it has any, trains on the next unseen seeds and writes weights, curves and
`progress.json` back. The recipe is a sequence of such runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.families import load, resolve
from kestrel.models.locate import CONFIG_NAME, read_config
from kestrel.runtime.device import choose_device
from kestrel.train.curves import CurveWriter, draw_curves
from kestrel.train.feed import ExampleFeed, FeedPlan
from kestrel.train.loop import Batch, StepReport, TrainingPlan, train
from kestrel.train.model import MoondreamModel, initialise, moondream, save_folder, tiny_config
from kestrel.train.objective import TaskTensors
from kestrel.train.options import TinyRun
from kestrel.train.packing import IMAGE_POSITIONS
from kestrel.train.prefetch import Prefetcher
from kestrel.train.scenes.atlas import SpriteAtlas, load_or_build_atlas
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.textures import upload_atlas
from kestrel.train.tasks.example import PromptFormat
from kestrel.train.tasks.mix import named_courses
from kestrel.train.tasks.view import path_book
from kestrel.train.tiny import build_tokenizer, prompt_format

CURVES, PICTURE = "curves.csv", "curves.png"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """What earlier runs did; seeds below `next_seed` have been seen."""

    next_seed: int = 0
    scenes: int = 0
    seconds: float = 0.0
    runs: int = 0

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """Nothing, where the folder says nothing."""
        path = folder / PROGRESS
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{each.name: content[each.name] for each in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "folder",
                f"{path} does not say what earlier runs did ({error!r}); correct it, or delete it to start again",
            ) from error

    def write(self, folder: Path) -> None:
        (folder / PROGRESS).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def run(
    options: TinyRun, report: Callable[[StepReport], None], should_stop: Callable[[], bool] = lambda: False
) -> Progress:
    """Trains and saves; ends early, saving all the same, after a step at which `should_stop` says so."""
    device = choose_device(RuntimeConfig(device=options.device))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(1)  # the cores belong to the feed; what is left here are tiny operations
    _make_folder(options)
    progress = Progress.read(options.folder)
    atlas = load_or_build_atlas(options.atlas)
    model, tokenizer_json = _start_model(options, device)
    _require_room(options, model)
    plan = _feed_plan(options, prompt_format(tokenizer_json, model.config.tokenizer), atlas, progress.next_seed)
    seconds = 0.0

    def keep_time(line: StepReport) -> None:
        nonlocal seconds
        seconds = line.seconds
        report(line)

    curves = options.folder / CURVES
    with (
        ExampleFeed(plan, options.workers) as feed,
        Prefetcher(_drawn(feed, atlas, device), _batch_tensors, device) as batches,
    ):
        training = _training_plan(options, device)
        scenes = train(model, batches, training, CurveWriter(curves), keep_time, progress.scenes, should_stop)
    seen = scenes - progress.scenes
    done = Progress(progress.next_seed + seen, scenes, progress.seconds + seconds, progress.runs + 1)
    save_folder(model, options.folder, tokenizer_json, shards=options.shards)
    done.write(options.folder)
    if curves.exists():
        draw_curves(curves, options.folder / PICTURE)
    return done


def _make_folder(options: TinyRun) -> None:
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("folder", f"{options.folder} cannot be made ({error.strerror}); name another one") from error


def _require_room(options: TinyRun, model: MoondreamModel) -> None:
    most = model.config.text.max_context - IMAGE_POSITIONS
    if options.length > most:
        raise ConfigError("length", f"must be {most} or less to fit the model's context (got {options.length})")


def _feed_plan(options: TinyRun, prompts: PromptFormat, atlas: SpriteAtlas, start_seed: int) -> FeedPlan:
    return FeedPlan(
        prompt_format=prompts,
        outlines=path_book(atlas),
        start_seed=start_seed,
        batch_size=options.batch_size,
        sizes=options.sizes,
        courses=named_courses(options.courses),
        tasks_per_scene=options.tasks_per_scene,
        length=options.length,
    )


def _training_plan(options: TinyRun, device: torch.device) -> TrainingPlan:
    return TrainingPlan(
        steps=options.steps,
        lr=options.lr,
        final_lr=options.final_lr,
        warmup_steps=options.warmup_steps,
        max_seconds=options.max_seconds,
        ema_decay=options.ema_decay,
        orthogonal=options.orthogonal,
        log_every=options.log_every,
        compile=device.type == "cuda",
    )


def _start_model(options: TinyRun, device: torch.device) -> tuple[MoondreamModel, str]:
    """The folder's model, or a fresh one; fp32 for training."""
    if read_config(options.folder) is None:
        return _fresh_model(options, device)
    located = resolve(RuntimeConfig(model_path=options.folder))
    model = moondream(load(located, device, torch.float32))
    return model.requires_grad_(True), located.tokenizer.read_text(encoding="utf-8")


def _fresh_model(options: TinyRun, device: torch.device) -> tuple[MoondreamModel, str]:
    """Only where there is none: saving replaces what is in the folder."""
    if (options.folder / CONFIG_NAME).exists() or any(options.folder.glob("*.safetensors")):
        raise ConfigError(
            "folder", f"{options.folder} holds a model whose config.json gives no dimensions; name an empty folder"
        )
    tokenizer_json, ids = build_tokenizer(options.seed)
    vocab_size = -(-len(json.loads(tokenizer_json)["model"]["vocab"]) // 64) * 64
    model = MoondreamModel(tiny_config(vocab_size, ids))
    return initialise(model, options.seed).to(device), tokenizer_json


def _drawn(feed: ExampleFeed, atlas: SpriteAtlas, device: torch.device) -> Iterator[Batch]:
    textures = upload_atlas(atlas, device)
    for scenes, packed in feed:
        yield draw_batch(scenes, textures), TaskTensors.upload(packed, device)


def _batch_tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch[0], *batch[1].tensors()]
