"""A data folder in memory: samples to learn from and samples to judge by, with no picture in both.

train.jsonl, optionally val.jsonl; or annotations.json (COCO), optionally val_annotations.json. Without a file to judge
by, some of the pictures are set aside, chosen by the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from kestrel.errors import ConfigError
from kestrel.train.adapter.coco import COCO_SKILLS, read_coco
from kestrel.train.adapter.samples import SKILLS, Mistake, MistakeList, Picture, PictureFolder, Sample, parse_line

TRAIN, VAL = "train.jsonl", "val.jsonl"
COCO_TRAIN, COCO_VAL = "annotations.json", "val_annotations.json"


@dataclass(frozen=True)
class DataChoice:
    """What to take from a folder."""

    skills: tuple[str, ...] = ()
    """Only these; without any, everything in JSONL files, and detect from COCO."""
    val_share: float = 0.1
    negatives: float = 0.2
    seed: int = 0


@dataclass(frozen=True)
class Dataset:
    train: tuple[Sample, ...]
    val: tuple[Sample, ...]
    num_left_out: int
    """Samples of skills that were not asked for."""

    @property
    def pictures(self) -> list[Picture]:
        """Each once, in the order of first use."""
        return list({sample.picture.digest: sample.picture for sample in (*self.train, *self.val)}.values())

    @property
    def skills(self) -> list[str]:
        return sorted({sample.example.skill for sample in self.train})

    def digest(self) -> str:
        """Of everything that is learnt from and judged by, pictures included."""
        hasher = hashlib.sha256()
        for part in (self.train, self.val):
            for sample in part:
                asked = [sample.picture.digest, sample.example.skill, dict(sample.example.fields)]
                said = [asdict(piece) if not isinstance(piece, str) else piece for piece in sample.example.target]
                hasher.update(json.dumps([asked, said]).encode() + b"\n")
            hasher.update(b"--\n")
        return hasher.hexdigest()


def read_dataset(folder: Path, pictures: PictureFolder, choice: DataChoice) -> Dataset:
    """Raises `DataError` with all mistakes of all files."""
    train_path, val_path = data_files(folder)
    mistakes = MistakeList()
    train, val = (_read(path, pictures, choice, mistakes) for path in (train_path, val_path))
    mistakes.check()
    kept_train, kept_val = _chosen(train, choice.skills), _chosen(val, choice.skills)
    if not kept_train:
        asked = f" for {', '.join(choice.skills)}" if choice.skills else ""
        found = Counter(sample.example.skill for sample in train)
        raise ConfigError("data", f"{train_path} holds no tasks{asked} (it has {dict(found) or 'none'}); add some")
    left_out = len(train) + len(val) - len(kept_train) - len(kept_val)
    if val_path is not None:
        _require_apart(kept_train, kept_val, val_path.name)
    else:
        kept_train, kept_val = split_by_picture(kept_train, choice.val_share, choice.seed)
    return Dataset(tuple(kept_train), tuple(kept_val), left_out)


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


def split_by_picture(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from and to judge by. A picture goes to one side with all its samples."""
    digests = list(dict.fromkeys(sample.picture.digest for sample in samples))
    count = round(share * len(digests))
    if share > 0.0:
        count = max(1, count)
    if count >= len(digests):
        raise ConfigError(
            "val_share",
            f"{share:g} of {len(digests)} pictures leaves none to learn from; add pictures, or give 0 to judge by none",
        )
    aside = set(Random(f"{seed} split").sample(digests, count))
    return (
        [sample for sample in samples if sample.picture.digest not in aside],
        [sample for sample in samples if sample.picture.digest in aside],
    )


def _read(path: Path | None, pictures: PictureFolder, choice: DataChoice, mistakes: MistakeList) -> list[Sample]:
    if path is None:
        return []
    if path.suffix == ".jsonl":
        return _read_lines(path, pictures, mistakes)
    skills = choice.skills or ("detect",)
    if other := [skill for skill in skills if skill not in COCO_SKILLS]:
        raise ConfigError(
            "skill",
            f"{other[0]} cannot be learnt from COCO annotations; use {', '.join(COCO_SKILLS)}, or write {TRAIN}",
        )
    return read_coco(path, pictures, skills, choice.negatives, choice.seed, mistakes)


def _read_lines(path: Path, pictures: PictureFolder, mistakes: MistakeList) -> list[Sample]:
    samples: list[Sample] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        mistakes.add(path.name, f"cannot be read ({error}); save it as UTF-8 text")
        return []
    for number, line in enumerate(lines, start=1):
        where = f"{path.name} line {number}"
        if not line.strip():
            continue
        try:
            samples.append(parse_line(line, pictures, where))
        except Mistake as mistake:
            mistakes.add(where, mistake)
    return samples


def _chosen(samples: Sequence[Sample], skills: Sequence[str]) -> list[Sample]:
    return [sample for sample in samples if not skills or sample.example.skill in skills]


def _require_apart(train: Sequence[Sample], val: Sequence[Sample], val_name: str) -> None:
    if not val:
        raise ConfigError("data", f"{val_name} holds no tasks of the skills to learn; add some, or remove the file")
    learnt = {sample.picture.digest: sample for sample in train}
    mistakes = MistakeList()
    for digest, sample in {sample.picture.digest: sample for sample in val}.items():
        if digest in learnt:
            where = learnt[digest].where
            mistakes.add(sample.where, f"image: its picture is learnt from in {where}; keep it on one side")
    mistakes.check()


def check_skills(skills: Sequence[str]) -> None:
    for skill in skills:
        if skill not in SKILLS:
            raise ConfigError("skill", f"there is no {skill!r} to train; use {', '.join(SKILLS)}")
