"""What one training run of an adapter is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.config import RuntimeConfig, required, setting
from kestrel.errors import ConfigError, shown

DEFAULT_EPOCHS = 10.0
FOLDER_SUFFIX = ".training"
MATRICES = ("qkv", "proj", "fc1", "fc2")
"""Those of a Moondream's blocks, which this training knows."""
SKILLS = ("query", "caption", "point", "detect", "segment")
TRAIN, VAL = "train.jsonl", "val.jsonl"
COCO_TRAIN, COCO_VAL = "annotations.json", "val_annotations.json"
STATE, CURVES, PICTURE, HELD_OUT = "state.pt", "curves.csv", "curves.png", "held_out.txt"


@dataclass(frozen=True, kw_only=True)
class AdapterRun:
    """One run, from a folder of examples to an adapter file. Every field is also a CLI flag."""

    data: Path = required(
        "Folder with train.jsonl (and val.jsonl), or with annotations.json (COCO), and the pictures.",
        metavar="DIR",
        common=True,
    )
    output: Path = required(
        "Adapter to write; curves and what --resume needs go to NAME.training.", metavar="NAME.safetensors", common=True
    )
    skills: tuple[str, ...] = setting(
        (),
        "Learn only this: query, caption, point, detect or segment. Repeatable, or separated by commas. "
        "Default: everything in train.jsonl; detect from COCO.",
        flags=("--skill",),
        metavar="SKILL",
    )
    model: str | None = setting(
        None,
        "Base model: a name that `kestrel models` lists. Default: kestrel-tiny, the embedded one.",
        metavar="NAME",
        group="Base model",
        common=True,
    )
    model_path: Path | None = setting(
        None, "Base model: a folder, or a single weights file.", metavar="PATH", common=True
    )
    tokenizer_path: Path | None = setting(None, "tokenizer.json to use with a single weights file.", metavar="FILE")
    rank: int = setting(16, "Rank of the adapter; experts share it.", group="Adapter")
    alpha: float | None = setting(None, "Deltas are scaled by alpha / rank. Default: the rank, for no scaling.")
    targets: str = setting(",".join(MATRICES), "Matrices to adapt, separated by commas.", metavar="NAME,...")
    epochs: float | None = setting(
        None,
        f"Passes over the data. Default: {DEFAULT_EPOCHS:g}, unless steps are given.",
        group="Learning",
        common=True,
    )
    steps: int | None = setting(None, "Batches to train on, instead of passes over the data.", common=True)
    batch_size: int = setting(4, "Pictures in a batch, each with its tasks.", common=True)
    length: int = setting(
        256, "Tokens of tasks that are learnt together with one picture; further tasks go into more rows."
    )
    lr: float | None = setting(
        None,
        "Learning rate after the warm-up; it falls along a half cosine. Default: 0.5 / the model's width, "
        "0.002 for kestrel-tiny and 0.00024 for Moondream 2.",
    )
    final_lr: float = setting(0.0, "Learning rate at the end.")
    warmup_steps: int = setting(20, "Steps in which the learning rate rises.")
    weight_decay: float = setting(0.01, "Weight decay of the factors.")
    clip_norm: float = setting(1.0, "Largest norm of a step's gradients.")
    val_share: float = setting(
        0.1,
        "Share of the pictures held out for validation, if there is no file for it; 0 for none.",
        group="Validation",
    )
    negatives: float = setting(0.2, "COCO: share of the questions that ask for something that is not there.")
    val_every: int | None = setting(None, "Steps between two validations. Default: one pass over the data.")
    val_pictures: int = setting(
        16, "Held-out pictures in which objects are located at each validation, for F1 and AP50; 0 for none."
    )
    patience: int = setting(5, "Validations without a better loss after which training ends early; 0 never ends early.")
    max_seconds: float = setting(
        math.inf,
        "Stop after this many seconds of steps and validation, and save; --resume continues. The time before the first "
        "step (loading, and reading each picture) is not counted.",
        show_default=False,
        group="Run",
        common=True,
    )
    resume: bool = setting(
        False,
        "Continue where a run with the same options stopped.",
        flags=("--resume",),
        show_default=False,
        common=True,
    )
    overwrite: bool = setting(
        False, "Start again and replace the files of an earlier run.", flags=("--overwrite",), show_default=False
    )
    seed: int = setting(0, "Seed for the first factors, the split and the order of the data.")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N. auto uses a GPU if there is one.", common=True)
    dtype: str = setting(
        "auto",
        "Number format of the frozen base. auto: bfloat16 on a GPU, float32 on a CPU; factors are float32. On a "
        "processor that computes bfloat16 only slowly, bfloat16 is read as float32.",
    )
    picture_memory_mb: int = setting(
        2048, "Memory for outputs of the vision encoder; pictures that do not fit are encoded each time."
    )
    max_image_pixels: int = setting(RuntimeConfig.max_image_pixels, "Largest picture in pixels, read from its header.")
    max_image_bytes: int = setting(RuntimeConfig.max_image_bytes, "Largest picture file in bytes.")
    log_every: int = setting(10, "Steps between two rows of the curves.")

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = self.__dict__[name]
            if value is not None and not low <= value <= high:
                raise ConfigError(name, f"must be from {low:g} to {high:g} (got {value:g})")
        if not self.max_seconds > 0.0:
            raise ConfigError("max_seconds", f"must be above 0 (got {self.max_seconds:g}); leave it out for no limit")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("steps", "is given together with epochs; give one of them")
        if self.resume and self.overwrite:
            raise ConfigError("overwrite", "is given together with resume; give one of them")
        if self.output.suffix != ".safetensors":
            raise ConfigError("output", f"{self.output} must end in .safetensors")
        for skill in self.skill_names:
            if skill not in SKILLS:
                raise ConfigError("skill", f"there is no {skill!r} to train; use {', '.join(SKILLS)}")
        _check_targets(self.targets)
        if self.runtime_config().dtype_name == "float16":
            raise ConfigError("dtype", "float16 is too narrow for gradients; use bfloat16 or float32")

    def check_files(self) -> None:
        """What can be refused before the data is read and a model is loaded."""
        data_files(self.data)
        if not self.output.absolute().parent.is_dir():
            raise ConfigError("output", f"{self.output.parent} is not a folder; create it first")
        taken = next((path for path in (self.output, self.folder / STATE) if path.exists()), None)
        if taken is not None and not self.resume and not self.overwrite:
            raise ConfigError(
                "output", f"{taken} exists; give --resume to continue, --overwrite to start again, or another name"
            )

    @property
    def skill_names(self) -> tuple[str, ...]:
        return tuple(_listed(",".join(self.skills)))

    @property
    def matrices(self) -> tuple[str, ...]:
        """In the order of the model, however they were listed."""
        names = _listed(self.targets)
        return tuple(name for name in MATRICES if name in names)

    @property
    def scale_alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha

    @property
    def folder(self) -> Path:
        """Where curves and the state of training go."""
        return self.output.with_suffix(FOLDER_SUFFIX)

    def runtime_config(self) -> RuntimeConfig:
        """Refuses models, devices and number formats that do not exist."""
        return RuntimeConfig(
            model=self.model,
            model_path=self.model_path,
            tokenizer_path=self.tokenizer_path,
            device=self.device,
            dtype=self.dtype,
            max_image_pixels=self.max_image_pixels,
            max_image_bytes=self.max_image_bytes,
        )

    def lr_for(self, width: int) -> float:
        return 0.5 / width if self.lr is None else self.lr

    def num_steps(self, num_rows: int) -> int:
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        return max(1, math.ceil(epochs * num_rows / self.batch_size))

    def steps_between_looks(self, num_rows: int) -> int:
        return self.val_every if self.val_every is not None else max(1, math.ceil(num_rows / self.batch_size))

    def what_must_not_change(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on from."""
        return {name: self.__dict__[name] for name in _FIXED}


_RANGES: dict[str, tuple[float, float]] = {
    "rank": (1, 512),
    "alpha": (1e-6, 1e6),
    "epochs": (0.001, 10**6),
    "steps": (1, 10**9),
    "batch_size": (1, 4096),
    "length": (1, 65_536),
    "lr": (0.0, 1.0),
    "final_lr": (0.0, 1.0),
    "warmup_steps": (0, 10**9),
    "weight_decay": (0.0, 1.0),
    "clip_norm": (1e-6, 1e6),
    "val_share": (0.0, 0.9),
    "negatives": (0.0, 0.9),
    "val_every": (1, 10**9),
    "val_pictures": (0, 10**6),
    "patience": (0, 10**6),
    "seed": (0, 2**63 - 1),
    "picture_memory_mb": (0, 2**20),
    "log_every": (1, 10**9),
}

_FIXED = (
    "rank", "alpha", "targets", "epochs", "steps", "batch_size", "length", "lr", "final_lr", "warmup_steps",
    "weight_decay", "clip_norm", "val_every", "patience", "seed",
)  # fmt: skip


def data_files(folder: Path) -> tuple[Path, Path | None]:
    """What to learn from, and what to judge by where there is such a file."""
    if not folder.is_dir():
        raise ConfigError("data", f"{folder} is not a folder; name the folder that holds {TRAIN} or {COCO_TRAIN}")
    lines, coco = folder / TRAIN, folder / COCO_TRAIN
    if lines.is_file() == coco.is_file():
        has = f"both {TRAIN} and {COCO_TRAIN}" if lines.is_file() else f"neither {TRAIN} nor {COCO_TRAIN}"
        raise ConfigError("data", f"{folder} has {has}; give exactly one of them")
    train, val = (lines, folder / VAL) if lines.is_file() else (coco, folder / COCO_VAL)
    return train, val if val.is_file() else None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_targets(text: str) -> None:
    names = _listed(text)
    if not names or len(set(names)) < len(names):
        raise ConfigError("targets", f"must name matrices, each once: {', '.join(MATRICES)} (got {shown(text)})")
    for name in names:
        if name not in MATRICES:
            raise ConfigError("targets", f"there is no {name!r}; known are: {', '.join(MATRICES)}")
