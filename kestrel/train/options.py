"""What one training run of kestrel-tiny is asked to do, and what earlier runs in its folder did."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH
from kestrel.train.scenes.sampling import MIN_PICTURE_PX
from kestrel.train.tasks.mix import EVERYTHING, Course

PROGRESS = "progress.json"
MAX_PICTURE_PX = 4096
MAX_SHARDS = 99_999


def _doc(text: str, **extra: Any) -> dict[str, Any]:
    return {"help": text, **extra}


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """One run, from a folder to a folder. Every field is also a CLI flag."""

    folder: Path = field(
        metadata=_doc(
            "Model folder to train in: a run goes on from its weights, or makes a fresh model.", metavar="DIR"
        )
    )
    steps: int = field(metadata=_doc("Batches to train on."))
    batch_size: int = field(default=128, metadata=_doc("Scenes in a batch."))
    tasks_per_scene: int = field(default=14, metadata=_doc("Tasks drawn for each scene."))
    length: int = field(
        default=294, metadata=_doc("Positions for tasks behind each picture; tasks that do not fit are left out.")
    )
    sizes: tuple[tuple[int, int], ...] = field(
        default=((378, 378),), metadata=_doc("Heights and widths; each batch takes one by chance.", flags=())
    )
    courses: tuple[Course, ...] = field(
        default=(EVERYTHING,), metadata=_doc("What is shown and asked; each batch takes one by chance.", flags=())
    )
    lr: float = field(default=1e-3, metadata=_doc("Learning rate after the warm-up."))
    final_lr: float = field(default=1e-3, metadata=_doc("Learning rate at the end, reached along a half cosine."))
    warmup_steps: int = field(default=200, metadata=_doc("Steps in which the learning rate rises."))
    ema_decay: float = field(default=0.999, metadata=_doc("How slowly the averaged weights follow; they are saved."))
    orthogonal: bool = field(
        default=True, metadata=_doc("Orthogonal steps for the matrices inside blocks, instead of AdamW.")
    )
    max_seconds: float = field(
        default=math.inf, metadata=_doc("End after this time if the steps are not done by then.", show_default=False)
    )
    seed: int = field(default=0, metadata=_doc("Of a fresh model's weights and tokenizer."))
    workers: int = field(default=4, metadata=_doc("Processes that make batches; 0 makes them between the steps."))
    device: str = field(default="auto", metadata=_doc("auto, cpu, cuda or cuda:N. auto takes a GPU when there is one."))
    log_every: int = field(default=25, metadata=_doc("Steps between two rows of the curves."))
    shards: int = field(default=1, metadata=_doc("Weights files to save."))
    atlas: Path = field(
        default=DEFAULT_ATLAS_PATH,
        metadata=_doc(
            "Sprites to draw scenes with. Built from this machine's fonts when there is none.", metavar="FILE"
        ),
    )

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = self.__dict__[name]
            if not low <= value <= high:
                raise ConfigError(name, f"must be from {low:g} to {high:g} (got {value:g})")
        if not self.max_seconds > 0.0:
            raise ConfigError("max_seconds", f"must be above 0 (got {self.max_seconds:g}); leave it out for no limit")
        RuntimeConfig(device=self.device)  # refuses devices that do not exist
        if not self.sizes or not self.courses:
            raise ConfigError("courses" if self.sizes else "sizes", "is empty; give at least one")
        for height, width in self.sizes:
            if not (MIN_PICTURE_PX <= height <= MAX_PICTURE_PX and MIN_PICTURE_PX <= width <= MAX_PICTURE_PX):
                raise ConfigError(
                    "sizes", f"sides must be from {MIN_PICTURE_PX} to {MAX_PICTURE_PX} (got {height}x{width})"
                )


_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 10**9),
    "batch_size": (1, 65_536),
    "tasks_per_scene": (1, 1024),
    "length": (1, 65_536),
    "lr": (0.0, 1.0),
    "final_lr": (0.0, 1.0),
    "warmup_steps": (0, 10**9),
    "ema_decay": (0.0, 0.999999),
    "seed": (0, 2**63 - 1),
    "workers": (0, 1024),
    "log_every": (1, 10**9),
    "shards": (1, MAX_SHARDS),
}


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
                "folder", f"{path} does not say what earlier runs did ({error!r}); mend it, or delete it to start over"
            ) from error

    def write(self, folder: Path) -> None:
        (folder / PROGRESS).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
