"""A data folder in memory: samples to learn from and samples to judge by, with no picture in both."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

from kestrel.errors import ConfigError, shown
from kestrel.train.adapter.options import TRAIN, data_files
from kestrel.train.adapter.samples import (
    Box,
    Mistake,
    MistakeList,
    Picture,
    PictureFolder,
    Point,
    Sample,
    Scale,
    box_pieces,
    num_places,
    outline_pieces,
    parse_line,
    point_pieces,
    read_polygon,
)
from kestrel.train.tasks.example import TaskExample

# ---------------------------------------------------------------------- COCO annotations
# COCO annotations as tasks: one question per picture and category that is there, and some for categories that are not.
#
# Pictures lie beside annotations.json or in `images/`. Categories with a crowd annotation in a picture are not asked
# for there, because nobody knows how many a crowd is; an outline is asked for where there is one object of one polygon.


IMAGE_FOLDER = "images"
COCO_SKILLS = ("detect", "point", "segment")
_OVERHANG_PX = 1.0
"""How far a box may reach beyond its picture: published annotations round."""


@dataclass
class _Group:
    """The objects of one category in one picture."""

    boxes: list[Box] = field(default_factory=list)
    polygons: list[list[Point] | None] = field(default_factory=list)
    is_crowd: bool = False


def read_coco(
    path: Path, pictures: PictureFolder, skills: Sequence[str], negatives: float, seed: int, mistakes: MistakeList
) -> list[Sample]:
    """Every mistake goes to the list; what is returned then is not to be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        mistakes.add(path.name, f"cannot be read as JSON ({error}); mend or export it again")
        return []
    reader = _CocoReader(path.name, pictures, mistakes)
    if not isinstance(content, dict):
        mistakes.add(path.name, 'must be an object with "images", "annotations" and "categories"; export it again')
        return []
    categories = reader.categories(content)
    found = reader.images(content)
    groups = reader.groups(content, found, categories)
    return list(_questions(path.name, found, categories, groups, skills, negatives, seed))


class _CocoReader:
    def __init__(self, file: str, pictures: PictureFolder, mistakes: MistakeList) -> None:
        self._file = file
        self._pictures = pictures
        self._mistakes = mistakes

    def categories(self, content: Mapping[str, Any]) -> dict[int, str]:
        names: dict[int, str] = {}
        for where, entry in self._entries(content, "categories"):
            number, name = entry.get("id"), entry.get("name")
            if not _is_id(number) or number in names:
                self._mistakes.add(where, f"id: must be a number of its own (got {shown(number)})")
            elif not isinstance(name, str) or not name.strip():
                self._mistakes.add(where, f"name: must be text (got {shown(name)})")
            else:
                names[number] = name
        return names

    def images(self, content: Mapping[str, Any]) -> dict[int, Picture]:
        found: dict[int, Picture] = {}
        for where, entry in self._entries(content, "images"):
            number = entry.get("id")
            if not _is_id(number) or number in found:
                self._mistakes.add(where, f"id: must be a number of its own (got {shown(number)})")
                continue
            try:
                found[number] = self._picture(entry)
            except Mistake as mistake:
                self._mistakes.add(where, mistake)
        return found

    def groups(
        self, content: Mapping[str, Any], found: Mapping[int, Picture], categories: Mapping[int, str]
    ) -> dict[tuple[int, int], _Group]:
        known_images = [entry.get("id") for _, entry in self._entries(content, "images", quietly=True)]
        known_ids = {number for number in known_images if _is_id(number)}
        groups: dict[tuple[int, int], _Group] = defaultdict(_Group)
        for where, entry in self._entries(content, "annotations"):
            image, category = entry.get("image_id"), entry.get("category_id")
            if not _is_id(image) or image not in known_ids:
                self._mistakes.add(where, f"image_id: {shown(image)} is not among the images; correct or remove it")
            elif not _is_id(category) or category not in categories:
                self._mistakes.add(where, f"category_id: {shown(category)} is not among the categories; correct it")
            elif image in found:
                try:
                    _add(groups[image, category], entry, found[image])
                except Mistake as mistake:
                    self._mistakes.add(where, mistake)
        return groups

    def _picture(self, entry: Mapping[str, Any]) -> Picture:
        name = entry.get("file_name")
        in_folder = isinstance(name, str) and self._pictures.exists(name, IMAGE_FOLDER)
        try:
            picture = self._pictures.find(name, IMAGE_FOLDER if in_folder else "")
        except Mistake as mistake:
            reason = str(mistake).removeprefix("image: ")
            if _is_about_no_file(mistake):
                where = f"neither beside {self._file} nor in {IMAGE_FOLDER}/"
                reason = f"{shown(name)} is {where}; put the picture there, as `kestrel label --with-pictures` does"
            raise Mistake("file_name", reason) from mistake
        told = entry.get("width", picture.width), entry.get("height", picture.height)
        if told != (picture.width, picture.height):
            size = f"{picture.width} x {picture.height}"
            raise Mistake(
                "width",
                f"the annotations say {told[0]} x {told[1]}, but {name} has {size} pixels (turned by its EXIF tag?); "
                "correct it",
            )
        return picture

    def _entries(
        self, content: Mapping[str, Any], key: str, quietly: bool = False
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        entries = content.get(key)
        if not isinstance(entries, list):
            if not quietly:
                self._mistakes.add(self._file, f"{key}: must be a list (got {shown(entries)}); export the file again")
            return
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                yield f"{self._file} {key}[{index}]", entry
            elif not quietly:
                self._mistakes.add(f"{self._file} {key}[{index}]", f"must be an object (got {shown(entry)})")


def _is_about_no_file(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, FileNotFoundError) or _is_about_no_file(error.__cause__))


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _add(group: _Group, entry: Mapping[str, Any], picture: Picture) -> None:
    if entry.get("iscrowd"):
        group.is_crowd = True
        return
    group.boxes.append(_box(entry.get("bbox"), picture))
    group.polygons.append(_polygon(entry.get("segmentation"), picture))


def _box(raw: object, picture: Picture) -> Box:
    values = raw if isinstance(raw, list) else []
    if len(values) != 4 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise Mistake("bbox", f"must be [x, y, width, height] in pixels (got {shown(raw)})")
    x, y, width, height = (float(value) for value in values)
    right, bottom = x + width, y + height
    reach = max(-x, -y, right - picture.width, bottom - picture.height)
    if not reach <= _OVERHANG_PX:
        size = f"{picture.width} x {picture.height}"
        raise Mistake("bbox", f"{shown(raw)} lies outside the picture of {size} pixels; give [x, y, width, height]")
    box = (
        max(x, 0.0) / picture.width,
        max(y, 0.0) / picture.height,
        min(right, picture.width) / picture.width,
        min(bottom, picture.height) / picture.height,
    )
    if box[0] >= box[2] or box[1] >= box[3]:
        raise Mistake("bbox", f"{shown(raw)} has no area; correct or remove it")
    return box


def _polygon(raw: object, picture: Picture) -> list[Point] | None:
    """None for what is no single polygon, such as a mask or an object in two parts."""
    if not isinstance(raw, list) or len(raw) != 1 or not isinstance(raw[0], list) or len(raw[0]) % 2:
        return None
    flat = raw[0]
    corners = [[flat[i], flat[i + 1]] for i in range(0, len(flat), 2)]
    return read_polygon("segmentation", corners, Scale(picture.width, picture.height)) or None


def _detect(name: str, group: _Group) -> TaskExample | None:
    return TaskExample("detect", "detect", {"object": name}, box_pieces(group.boxes))


def _point(name: str, group: _Group) -> TaskExample | None:
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in group.boxes]
    return TaskExample("point", "point", {"object": name}, point_pieces(centres))


def _segment(name: str, group: _Group) -> TaskExample | None:
    if not group.polygons:
        return TaskExample("segment", "segment", {"object": name}, ())
    only = group.polygons[0] if len(group.polygons) == 1 else None
    return None if only is None else TaskExample("segment", "segment", {"object": name}, outline_pieces(only))


_MAKERS: Mapping[str, Callable[[str, _Group], TaskExample | None]] = {
    "detect": _detect,
    "point": _point,
    "segment": _segment,
}


def _asked(where: str, picture: Picture, name: str, group: _Group, skills: Sequence[str]) -> Iterator[Sample]:
    for skill in skills:
        example = _MAKERS[skill](name, group)
        if example is not None:
            yield Sample(where, picture, example)


def _questions(
    file: str,
    found: Mapping[int, Picture],
    categories: Mapping[int, str],
    groups: Mapping[tuple[int, int], _Group],
    skills: Sequence[str],
    negatives: float,
    seed: int,
) -> Iterator[Sample]:
    """What is there, and what is absent: drawn by lot to be that share of all questions, or as many as there can be.

    A share of 1 asks for every category in every picture.
    """
    for (image, category), group in groups.items():
        if not group.is_crowd:
            where = f"{file} image {image}, category {category}"
            yield from _asked(where, found[image], categories[category], group, skills)
    absent = [(image, category) for image in found for category in categories if (image, category) not in groups]
    wanted = len(absent) if negatives >= 1.0 else round(len(groups) * negatives / (1.0 - negatives))
    for image, category in sorted(Random(f"{seed} negatives").sample(absent, min(wanted, len(absent)))):
        where = f"{file} image {image}, category {category} (absent)"
        yield from _asked(where, found[image], categories[category], _Group(), skills)


# ---------------------------------------------------------------------- the folder
# train.jsonl, optionally val.jsonl; or annotations.json (COCO), optionally val_annotations.json. Without a file to
# judge by, some of the pictures are set aside, chosen by the seed.


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
    num_equal: int = 0
    """Files that show the same as one of `pictures`."""
    num_without_task: int = 0
    """Files that nothing is asked about."""

    @property
    def pictures(self) -> list[Picture]:
        """Each once, in the order of first use."""
        return list({sample.picture.digest: sample.picture for sample in (*self.train, *self.val)}.values())

    @property
    def num_objects(self) -> dict[str, int]:
        """Boxes, points and outlines to learn from by name, the most frequent first."""
        found: Counter[str] = Counter()
        for sample in self.train:
            if "object" in sample.example.fields:
                found[sample.example.fields["object"]] += num_places(sample.example)
        return dict(found.most_common())

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
    train, val = (
        [] if path is None else read_samples(path, pictures, choice, mistakes) for path in (train_path, val_path)
    )
    mistakes.check()
    kept_train, kept_val = _chosen(train, choice.skills), _chosen(val, choice.skills)
    if not kept_train:
        asked = f" for {', '.join(choice.skills)}" if choice.skills else ""
        found = Counter(sample.example.skill for sample in train)
        num_pictures = len(pictures.pictures)
        has = dict(found) or (f"{num_pictures} pictures without annotations" if num_pictures else "no pictures")
        raise ConfigError("data", f"{train_path} holds no tasks{asked} (it has {has}); add some, or label it first")
    left_out = len(train) + len(val) - len(kept_train) - len(kept_val)
    if val_path is not None:
        _require_apart(kept_train, kept_val, val_path.name)
    else:
        kept_train, kept_val = split_by_picture(kept_train, choice.val_share, choice.seed)
    if all(not sample.example.target for sample in kept_train):
        side = "" if val_path is not None or not kept_val else f" (with {len(kept_val)} set aside to judge by)"
        raise ConfigError(
            "data",
            f"all {len(kept_train)} tasks of {train_path} to learn from say that nothing is there{side}; add pictures "
            "with boxes or points",
        )
    used = {sample.picture.digest for sample in (*kept_train, *kept_val)}
    num_used = sum(picture.digest in used for picture in pictures.pictures)
    num_unused = len(pictures.pictures) - num_used
    return Dataset(tuple(kept_train), tuple(kept_val), left_out, num_used - len(used), num_unused)


def split_by_picture(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from and to judge by. A picture goes to one side with all its samples."""
    digests = list(dict.fromkeys(sample.picture.digest for sample in samples))
    count = round(share * len(digests))
    if share > 0.0:
        count = max(1, count)
    if count >= len(digests):
        raise ConfigError(
            "val_share",
            f"{share:g} of {len(digests)} pictures leaves none to learn from; add pictures, or give 0 to hold out none",
        )
    aside = set(Random(f"{seed} split").sample(digests, count))
    return (
        [sample for sample in samples if sample.picture.digest not in aside],
        [sample for sample in samples if sample.picture.digest in aside],
    )


def read_samples(path: Path, pictures: PictureFolder, choice: DataChoice, mistakes: MistakeList) -> list[Sample]:
    """Of one file: lines, or COCO."""
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
