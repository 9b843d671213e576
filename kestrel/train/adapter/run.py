"""One training run, from a folder of examples to an adapter file: what `kestrel train adapter` does."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from kestrel.adapters import save_adapter
from kestrel.errors import ConfigError
from kestrel.families import find_family, load, resolve
from kestrel.images.encoded import ImageLimits
from kestrel.models.family import LoadedModel
from kestrel.runtime.device import choose_device, choose_dtype, fast_dtype
from kestrel.train.adapter.dataset import DataChoice, Dataset, read_dataset
from kestrel.train.adapter.encoding import EmbeddedPictures, SampleEncoder, TrainingRow
from kestrel.train.adapter.loop import (
    AdapterTask,
    Ending,
    Factors,
    LoopPlan,
    StepLine,
    TrainingState,
    read_state,
    train_adapter,
    write_state,
)
from kestrel.train.adapter.options import CURVES, PICTURE, STATE, AdapterRun
from kestrel.train.adapter.samples import MistakeList, PictureFolder
from kestrel.train.curves import CurveWriter, draw_curves
from kestrel.train.model import moondream

CURVE_COLOURS = {"loss": "#2563eb", "val_loss": "#dc2626", "text": "#94a3b8", "token_accuracy": "#9333ea"}


@dataclass(frozen=True)
class Beginning:
    """What a run is about to do."""

    base_model: str
    num_pictures: int
    num_train_tasks: int
    num_val_tasks: int
    num_left_out: int
    num_parameters: int
    steps: int
    first_step: int


@dataclass(frozen=True)
class Trained:
    output: Path
    step: int
    """Of the adapter that was written; 0 when the run was stopped before its first step, and none was."""
    val_loss: float | None
    steps_done: int
    seconds: float
    ending: Ending


class RunReport(Protocol):
    def beginning(self, beginning: Beginning) -> None: ...

    def picture(self, done: int, total: int) -> None: ...

    def line(self, line: StepLine) -> None: ...


def run_adapter(options: AdapterRun, report: RunReport, should_stop: Callable[[], bool] = lambda: False) -> Trained:
    """Trains and saves; ends early, saving all the same, after a step at which `should_stop` says so."""
    _check_output(options)
    config = options.runtime_config()
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
            loaded.name, len(dataset.pictures), len(dataset.train), len(dataset.val), dataset.num_left_out,
            factors.num_parameters, plan.steps, state.step,
        )
    )  # fmt: skip
    pictures.prepare(report.picture, should_stop)
    assert profile.regions is not None
    task = AdapterTask(moondream(loaded), decoder.adapter_shape, pictures, profile.regions)
    keeper = _Keeper(options, dataset, loaded.name, factors, report)
    ending = train_adapter(task, factors, train, val, plan, state, keeper, should_stop)
    return keeper.finish(task, val, plan, state, ending)


def _check_output(options: AdapterRun) -> None:
    if not options.output.absolute().parent.is_dir():
        raise ConfigError("output", f"{options.output.parent} is not a folder; create it first")
    state = options.folder / STATE
    taken = next((path for path in (options.output, state) if path.exists()), None)
    if taken is not None and not options.resume and not options.overwrite:
        raise ConfigError(
            "output", f"{taken} exists; give --resume to go on, --overwrite to start anew, or another name"
        )


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

    def on_line(self, line: StepLine) -> None:
        if self._is_first_line:
            self._begin_curves(line.step)
        row = asdict(line)
        self._curves.write({**row, "val_loss": "" if line.val_loss is None else line.val_loss})
        self._report.line(line)

    def on_better(self, state: TrainingState) -> None:
        self._write_adapter(state.step, state.best_loss)

    def on_state(self, state: TrainingState) -> None:
        write_state(state, self._made_with, self._options.folder / STATE)

    def finish(
        self, task: AdapterTask, val: list[TrainingRow], plan: LoopPlan, state: TrainingState, ending: Ending
    ) -> Trained:
        """Without a look at the validation loss so far, the factors as they are now are written."""
        step, loss = state.best_step, state.best_loss
        if loss is None and state.step:
            step, loss = state.step, task.judge(val, self._factors.adapter(), plan.batch_size) if val else None
            self._write_adapter(step, loss)
        if self._curves_path.exists():
            draw_curves(self._curves_path, self._options.folder / PICTURE, "pictures", CURVE_COLOURS)
        return Trained(self._options.output, step, loss, state.step, state.seconds, ending)

    def _write_adapter(self, step: int, val_loss: float | None) -> None:
        options, dataset = self._options, self._dataset
        metadata = {
            "skills": " ".join(dataset.skills),
            "steps": str(step),
            "val_loss": "none" if val_loss is None else f"{val_loss:.6g}",
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
            self._curves.write(row)
