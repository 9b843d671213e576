"""What one training run of kestrel-tiny is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kestrel.config import RuntimeConfig, required, setting
from kestrel.errors import ConfigError

DEFAULT_ATLAS_PATH = Path("out/atlas.npz")
COURSE_NAMES = ("beginning", "everything", "reading")
"""Those of `kestrel.train.tasks.mix`, which imports much."""
MIN_PICTURE_PX = 16
MAX_PICTURE_PX = 4096
MAX_SHARDS = 99_999


@dataclass(frozen=True, kw_only=True)
class TinyRun:
    """One run, from a folder to a folder. Every field is also a CLI flag."""

    folder: Path = required(
        "Model folder to train in: a run continues with its weights, or makes a new model.", metavar="DIR", common=True
    )
    steps: int = required("Batches to train on.", common=True)
    batch_size: int = setting(128, "Scenes in a batch.", common=True)
    tasks_per_scene: int = setting(14, "Tasks drawn for each scene.")
    length: int = setting(294, "Positions for tasks after each picture; tasks that do not fit are left out.")
    sizes: tuple[tuple[int, int], ...] = setting(
        ((378, 378),), "Heights and widths; each batch takes one at random.", flags=()
    )
    courses: tuple[tuple[str, float], ...] = setting(
        (("everything", 1.0),), "Names of what is shown and asked, with their shares of the batches.", flags=()
    )
    lr: float = setting(1e-3, "Learning rate after the warm-up.", group="Learning", common=True)
    final_lr: float = setting(1e-3, "Learning rate at the end, reached along a half cosine.")
    warmup_steps: int = setting(200, "Steps in which the learning rate rises.")
    ema_decay: float = setting(0.999, "Decay of the averaged weights, which are saved.")
    orthogonal: bool = setting(True, "Orthogonal steps for the matrices inside blocks, instead of AdamW.")
    max_seconds: float = setting(
        math.inf,
        "End after this many seconds of training, even if steps are left. Loading is not counted.",
        show_default=False,
        group="Run",
        common=True,
    )
    seed: int = setting(0, "Seed for the weights and the tokenizer of a new model.")
    workers: int = setting(4, "Processes that make batches; 0 makes them between the steps.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N. auto uses a GPU if there is one.", common=True)
    log_every: int = setting(25, "Steps between two rows of the curves.")
    shards: int = setting(1, "Weights files to save.")
    atlas: Path = setting(
        DEFAULT_ATLAS_PATH,
        "Sprites to draw scenes with. Built from this machine's fonts when there is none.",
        metavar="FILE",
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
        for name, share in self.courses:
            if name not in COURSE_NAMES:
                raise ConfigError("courses", f"there is no {name!r}; known are: {', '.join(COURSE_NAMES)}")
            if not share > 0.0:
                raise ConfigError("courses", f"the share of {name} must be above 0 (got {share!r})")


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
