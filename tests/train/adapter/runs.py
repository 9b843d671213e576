"""Training runs of tests: the coarse golden models, small data, one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kestrel.adapters import Adapter, load_adapter
from kestrel.moondream.decoder import MoondreamDecoder, adapter_shape
from kestrel.moondream.prompts import moondream_profile
from kestrel.moondream.spec import LoadedMoondream
from kestrel.train.adapter.dataset import Dataset
from kestrel.train.adapter.encoding import EmbeddedPictures, TrainingRow
from kestrel.train.adapter.loop import AdapterTask, StepLine
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.run import Beginning, Trained, encoded, load_base, run_adapter
from kestrel.train.adapter.samples import PictureFolder
from tests.moondream.coarse import coarse_folder

from .data_folder import LIMITS, read

RANKS = {"md2": 4, "md3": 6}
"""Three experts share the rank in md3."""


class QuietReport:
    """Keeps what a run reports."""

    def __init__(self) -> None:
        self.begun: list[Beginning] = []
        self.num_pictures = 0
        self.lines: list[StepLine] = []

    def beginning(self, beginning: Beginning) -> None:
        self.begun.append(beginning)

    def picture(self, done: int, total: int) -> None:
        self.num_pictures = done

    def line(self, line: StepLine) -> None:
        self.lines.append(line)


def options(data: Path, output: Path, family: str = "md3", **changes: Any) -> AdapterRun:
    values: dict[str, Any] = {
        "rank": RANKS[family], "lr": 1e-2, "warmup_steps": 2, "batch_size": 2, "steps": 8, "val_share": 0.25,
        "val_every": 4, "log_every": 2, "device": "cpu", "model_path": coarse_folder(family),
    }  # fmt: skip
    return AdapterRun(data=data, output=output, **(values | changes))


def run(run_options: AdapterRun, should_stop: Callable[[], bool] = lambda: False) -> tuple[Trained, QuietReport]:
    torch.set_num_threads(1)
    report = QuietReport()
    return run_adapter(run_options, report, should_stop), report


def task_of(run_options: AdapterRun) -> tuple[AdapterTask, list[TrainingRow], list[TrainingRow], LoadedMoondream]:
    """What a run with these options trains on."""
    data: Dataset = read(run_options.data, val_share=run_options.val_share, seed=run_options.seed)
    loaded = load_base(run_options)
    train, val = encoded(data, loaded, run_options)
    decoder = MoondreamDecoder(loaded.model)
    pictures = EmbeddedPictures(PictureFolder(run_options.data, LIMITS), decoder, data.pictures, 2**30)
    ids = moondream_profile(loaded.config, loaded.tokenizer, loaded.name).regions
    return AdapterTask(loaded.model, decoder.adapter_shape, pictures, ids), train, val, loaded


def loaded_adapter(path: Path, loaded: LoadedMoondream) -> Adapter:
    return load_adapter(path, adapter_shape(loaded.config.text))
