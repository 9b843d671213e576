"""One training run, from a folder of examples to an adapter file: what `kestrel train adapter` does."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from kestrel.adapters import save_adapter
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.families import find_family, find_repository, load, resolve
from kestrel.images.encoded import ImageLimits
from kestrel.known_models import find_model, names_repository
from kestrel.models.family import LoadedModel
from kestrel.runtime.device import choose_device, choose_dtype, fast_dtype
from kestrel.train.adapter.dataset import DataChoice, Dataset, read_dataset
from kestrel.train.adapter.encoding import EmbeddedPictures, SampleEncoder, TrainingRow
from kestrel.train.adapter.loop import (
    AdapterTask,
    Ending,
    Examiner,
    Factors,
    LoopPlan,
    StepLine,
    TrainingState,
    read_state,
    train_adapter,
    write_state,
)
from kestrel.train.adapter.options import CURVES, HELD_OUT, PICTURE, STATE, AdapterRun
from kestrel.train.adapter.samples import MistakeList, PictureFolder
from kestrel.train.curves import CurveWriter, draw_curves
from kestrel.train.model import moondream, require_moondream

CURVE_COLOURS = {
    "loss": "#2563eb",
    "val_loss": "#dc2626",
    "val_f1": "#16a34a",
    "val_ap50": "#ca8a04",
    "token_accuracy": "#9333ea",
}


@dataclass(frozen=True)
class Beginning:
    """What a run is about to do."""

    base_model: str
    num_pictures: int
    num_equal: int
    """Files that show the same as one of these pictures."""
    num_without_task: int
    num_train_tasks: int
    num_val_tasks: int
    num_left_out: int
    num_objects: Mapping[str, int]
    """Boxes, points and outlines to learn from, by name."""
    num_parameters: int
    steps: int
    first_step: int
    steps_between_saves: int


@dataclass(frozen=True)
class Trained:
    output: Path
    step: int
    """Of the adapter that was written; 0 when the run was stopped before its first step, and none was."""
    val_loss: float | None
    val_f1: float | None
    val_ap50: float | None
    steps_done: int
    steps: int
    """That were to be done."""
    seconds: float
    ending: Ending


class RunReport(Protocol):
    def beginning(self, beginning: Beginning) -> None: ...

    def picture(self, done: int, total: int) -> None: ...

    def line(self, line: StepLine) -> None: ...


MakeExaminer: TypeAlias = Callable[[LoadedModel[Any, Any], Dataset, PictureFolder, AdapterRun], Examiner | None]
"""What locates objects in held-out pictures is above this room."""


def run_adapter(
    options: AdapterRun,
    report: RunReport,
    should_stop: Callable[[], bool] = lambda: False,
    make_examiner: MakeExaminer = lambda *_: None,
) -> Trained:
    """Trains and saves; ends early, saving all the same, after a step at which `should_stop` says so."""
    options.check_files()
    config = options.runtime_config()
    require_moondream(*_named_model(config))
    limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.honour_exif_orientation)
    folder = PictureFolder(options.data, limits)
    choice = DataChoice(options.skill_names, options.val_share, options.negatives, options.seed)
    dataset = read_dataset(options.data, folder, choice)
    loaded = load_base(options)
    train, val = encoded(dataset, loaded, options)
    state = _starting_state(options, dataset, loaded.name)
    decoder, profile = find_family(loaded.family).decoder(loaded), find_family(loaded.family).profile(loaded)
    pictures = EmbeddedPictures(folder, decoder, dataset.pictures, options.picture_memory_mb * 2**20)
    factors = Factors(
        decoder.adapter_shape, options.matrices, options.rank, options.scale_alpha, options.seed, decoder.device
    )
    plan = _loop_plan(options, len(train), decoder.shape.hidden_dim)
    report.beginning(
        Beginning(
            loaded.name, len(dataset.pictures), dataset.num_equal, dataset.num_without_task, len(dataset.train),
            len(dataset.val), dataset.num_left_out, dataset.num_objects, factors.num_parameters, plan.steps, state.step,
            plan.steps_between_looks,
        )
    )  # fmt: skip
    pictures.prepare(report.picture, should_stop)
    assert profile.regions is not None
    task = AdapterTask(moondream(loaded), decoder.adapter_shape, pictures, profile.regions)
    keeper = _Keeper(options, dataset, loaded.name, factors, report)
    examine = make_examiner(loaded, dataset, folder, options)
    ending = train_adapter(task, factors, train, val, plan, state, keeper, should_stop, examine)
    return keeper.finish(task, val, plan, state, ending, examine)


def _named_model(config: RuntimeConfig) -> tuple[str, str]:
    """Name and family, without the weights: nobody should wait for a model that cannot be trained."""
    if config.weights is None and config.model is not None:
        named = find_repository(config.model) if names_repository(config.model) else find_model(config.model)
    else:
        named = resolve(config)
    return named.name, named.family


def load_base(options: AdapterRun) -> LoadedModel[Any, Any]:
    config = options.runtime_config()
    device = choose_device(config)
    if device.type == "cuda":  # read once, at the first matrix product; without it none repeats bit by bit
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    loaded = load(resolve(config), device, fast_dtype(device, choose_dtype(config, device)))
    moondream(loaded)  # refuses models of other families
    return loaded


def encoded(
    dataset: Dataset, loaded: LoadedModel[Any, Any], options: AdapterRun
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    family = find_family(loaded.family)
    shape = family.decoder(loaded).shape
    room = shape.max_context - 1 - shape.num_image_positions
    if options.length > room:
        raise ConfigError("length", f"must be {room} or less to fit the model's context (got {options.length})")
    encoder = SampleEncoder(family.profile(loaded), options.length)
    index = {picture.digest: number for number, picture in enumerate(dataset.pictures)}
    mistakes = MistakeList()
    train, val = (encoder.rows(part, index, mistakes) for part in (dataset.train, dataset.val))
    mistakes.check()
    return train, val


def _starting_state(options: AdapterRun, dataset: Dataset, base_model: str) -> TrainingState:
    if options.resume:
        return read_state(options.folder / STATE, _made_with(options, dataset, base_model))
    return TrainingState()


def _made_with(options: AdapterRun, dataset: Dataset, base_model: str) -> dict[str, Any]:
    return {**options.what_must_not_change(), "base_model": base_model, "data": dataset.digest()}


def _loop_plan(options: AdapterRun, num_rows: int, width: int) -> LoopPlan:
    return LoopPlan(
        steps=options.num_steps(num_rows),
        steps_between_looks=options.steps_between_looks(num_rows),
        batch_size=options.batch_size,
        lr=options.lr_for(width),
        final_lr=options.final_lr,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        patience=options.patience,
        max_seconds=options.max_seconds,
        log_every=options.log_every,
        seed=options.seed,
    )


class _Keeper:
    """Writes what a run leaves behind: the best adapter, the state, the curves."""

    def __init__(
        self, options: AdapterRun, dataset: Dataset, base_model: str, factors: Factors, report: RunReport
    ) -> None:
        self._options = options
        self._dataset = dataset
        self._digest = dataset.digest()
        self._base_model = base_model
        self._factors = factors
        self._report = report
        self._made_with = _made_with(options, dataset, base_model)
        options.folder.mkdir(exist_ok=True)
        self._curves_path = options.folder / CURVES
        self._is_first_line = True
        self._curves = CurveWriter(self._curves_path)
        names = sorted({sample.picture.path.relative_to(options.data).as_posix() for sample in dataset.val})
        (options.folder / HELD_OUT).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")

    def on_line(self, line: StepLine) -> None:
        if self._is_first_line:
            self._begin_curves(line.step)
        self._curves.write({name: "" if value is None else value for name, value in asdict(line).items()})
        self._report.line(line)

    def on_better(self, state: TrainingState) -> None:
        self._write_adapter(state.step, state)

    def on_state(self, state: TrainingState) -> None:
        write_state(state, self._made_with, self._options.folder / STATE)

    def finish(
        self,
        task: AdapterTask,
        val: list[TrainingRow],
        plan: LoopPlan,
        state: TrainingState,
        ending: Ending,
        examine: Examiner | None,
    ) -> Trained:
        """Without a look at the validation loss so far, the factors as they are now are written."""
        step, best = state.best_step, state
        if state.best_loss is None and state.step:
            adapter = self._factors.adapter()
            step = state.step
            best = TrainingState(best_loss=task.judge(val, adapter, plan.batch_size) if val else None)
            # Whoever interrupts a run does not want to wait for more than its files.
            best.keep_held_out(None if examine is None or ending == "interrupted" else examine(adapter))
            self._write_adapter(step, best)
        if self._curves_path.exists():
            draw_curves(self._curves_path, self._options.folder / PICTURE, "pictures", CURVE_COLOURS)
        figures = best.best_loss, best.best_f1, best.best_ap50
        return Trained(self._options.output, step, *figures, state.step, plan.steps, state.seconds, ending)

    def _write_adapter(self, step: int, best: TrainingState) -> None:
        options, dataset = self._options, self._dataset
        metadata = {
            "skills": " ".join(dataset.skills),
            "steps": str(step),
            "val_loss": _told(best.best_loss),
            "val_f1": _told(best.best_f1),
            "val_ap50": _told(best.best_ap50),
            "data_digest": self._digest,
            "train_tasks": str(len(dataset.train)),
            "val_tasks": str(len(dataset.val)),
            "seed": str(options.seed),
        }
        save_adapter(self._factors.adapter(self._base_model, metadata), options.output)

    def _begin_curves(self, next_step: int) -> None:
        """A run that starts anew starts its curves anew; rows that a resumed run will make again are dropped."""
        self._is_first_line = False
        if not self._curves_path.exists():
            return
        with self._curves_path.open(newline="") as file:
            reader = csv.DictReader(file)
            kept = [row for row in reader if self._options.resume and int(row["step"]) < next_step]
        self._curves_path.unlink()
        self._curves = CurveWriter(self._curves_path)
        for row in kept:
            self._curves.write({**dict.fromkeys((each.name for each in fields(StepLine)), ""), **row})


def _told(figure: float | None) -> str:
    return "none" if figure is None else f"{figure:.6g}"
