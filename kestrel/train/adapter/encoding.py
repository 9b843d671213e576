"""Rows of training: pictures as the frozen vision tower sees them, and their tasks as the engine would lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from kestrel.errors import RequestError
from kestrel.models.contract import DecoderModel
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile
from kestrel.train.adapter.samples import Mistake, MistakeList, Picture, PictureFolder, Sample
from kestrel.train.tasks.example import Apart, EncodedTask, TaskEncoder, TaskExample


@dataclass(frozen=True)
class TrainingRow:
    """One sequence: the picture's number among all pictures, and tasks that do not see each other."""

    picture: int
    tasks: tuple[EncodedTask, ...]


class SampleEncoder:
    """Encodes samples for one model; a task longer than `length` positions is a mistake."""

    def __init__(self, profile: ModelProfile, length: int) -> None:
        self._profile = profile
        self._length = length
        self._encoder = TaskEncoder(profile, default_registry(lambda: 0))

    def rows(
        self, samples: Sequence[Sample], picture_index: dict[str, int], mistakes: MistakeList
    ) -> list[TrainingRow]:
        """All tasks of all pictures; those of a picture that fit together stand in one row."""
        by_picture: dict[int, list[EncodedTask]] = {}
        for sample in samples:
            try:
                task = self._encode(sample.example)
            except (Mistake, RequestError) as error:
                mistakes.add(sample.where, error)
                continue
            by_picture.setdefault(picture_index[sample.picture.digest], []).append(task)
        return [TrainingRow(picture, part) for picture, tasks in by_picture.items() for part in self._parts(tasks)]

    def _encode(self, example: TaskExample) -> EncodedTask:
        for piece in example.target:
            if isinstance(piece, Apart):
                self._require_single_tokens(piece)
        task = self._encoder.encode(example)
        if task.num_inputs > self._length:
            raise Mistake(
                example.skill,
                f"takes {task.num_inputs} positions, at most {self._length} fit; shorten it or raise --length",
            )
        return task

    def _require_single_tokens(self, path: Apart) -> None:
        """The segment skill reads outlines token by token."""
        for item in set(path.pieces):
            if len(self._profile.tokenizer.encode(item)) != 1:
                raise Mistake("polygon", f"this model has no token for {item!r} of an outline; train another skill")

    def _parts(self, tasks: Sequence[EncodedTask]) -> Iterator[tuple[EncodedTask, ...]]:
        part: list[EncodedTask] = []
        for task in tasks:
            if sum(each.num_inputs for each in (*part, task)) > self._length:
                yield tuple(part)
                part = []
            part.append(task)
        if part:
            yield tuple(part)


class RowOrder:
    """Which rows each step takes: pass after pass over all of them, every pass in an order of its own.

    A step depends on the seed and its number alone, so that a run can go on where another stopped.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._order = lru_cache(2)(self._order_of_pass)

    def batch(self, step: int) -> list[int]:
        first = step * self._batch_size
        return [self._row(place) for place in range(first, first + self._batch_size)]

    def _row(self, place: int) -> int:
        number, at = divmod(place, self._num_rows)
        return self._order(number)[at]

    def _order_of_pass(self, number: int) -> list[int]:
        order = list(range(self._num_rows))
        Random(f"{self._seed} pass {number}").shuffle(order)
        return order


class EmbeddedPictures:
    """What the frozen vision tower makes of each picture: computed once and kept up to a bound, else computed again.

    Kept values are the computed ones bit by bit, so the bound changes the time a run takes and nothing else.
    """

    def __init__(
        self, folder: PictureFolder, decoder: DecoderModel, pictures: Sequence[Picture], max_bytes: int
    ) -> None:
        self._folder = folder
        self._decoder = decoder
        self._pictures = pictures
        shape = decoder.shape
        each = shape.num_image_positions * shape.hidden_dim * decoder.dtype.itemsize
        self.num_kept = min(len(pictures), max_bytes // each)
        self._kept: dict[int, Tensor] = {}

    def prepare(self, on_picture: Callable[[int, int], None], should_stop: Callable[[], bool]) -> None:
        """Computes what will be kept. Whoever stops it early gets the rest computed when it is asked for."""
        for index in range(self.num_kept):
            if should_stop():
                return
            self._kept[index] = self._embed(index)
            on_picture(index + 1, self.num_kept)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """[B, patches, dim] on the model's device."""
        return torch.stack([self._one(index) for index in indices])

    def _one(self, index: int) -> Tensor:
        if index not in self._kept:
            found = self._embed(index)
            if index >= self.num_kept:
                return found
            self._kept[index] = found
        return self._kept[index]

    def _embed(self, index: int) -> Tensor:
        vision = self._decoder.vision
        assert vision is not None
        with torch.no_grad():
            prepared = vision.prepare_image(self._folder.read(self._pictures[index]))
            return vision.embed_images([prepared])[0]
