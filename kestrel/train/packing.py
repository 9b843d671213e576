"""Tasks of many scenes as arrays: the tasks of a scene stand one after another behind its picture.

Every task sees the picture (if it has one) and itself, never another task; so positions start anew with each. What
follows an input inside its task is its label: an id, and for coordinates and sizes the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.skills.base import RegionIds
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, Token
from kestrel.train.tasks.example import EncodedTask

PAD, TEXT, COORD, SIZE = 0, 1, 2, 3
NO_LABEL = -100
NO_VALUE = -1.0
NO_TASK = -1
IMAGE_POSITIONS = 730
"""Positions of the beginning of text and a picture of 27 x 27 patches."""


@dataclass
class PackedTasks:
    input_kind: NDArray[np.int8]  # [B, L] PAD, TEXT, COORD or SIZE
    input_id: NDArray[np.int32]  # [B, L] ids of text; of coordinates and sizes the control id
    input_value: NDArray[np.float32]  # [B, L, 2] coordinate in the first, or width and height
    position: NDArray[np.int32]  # [B, L]
    task: NDArray[np.int16]  # [B, L] index in the scene's list, NO_TASK for padding
    sees_image: NDArray[np.bool_]  # [B, L] whether the picture is in sight
    label_id: NDArray[np.int32]  # [B, L] NO_LABEL where nothing is to be learnt
    label_coord: NDArray[np.float32]  # [B, L] NO_VALUE where the label is no coordinate
    label_size: NDArray[np.float32]  # [B, L, 2] NO_VALUE where the label is no size
    num_dropped: int = 0
    """Tasks that did not fit."""

    @property
    def num_inputs(self) -> int:
        return int(np.count_nonzero(self.input_kind))


def pack(
    encoded: Sequence[Sequence[EncodedTask]], length: int, ids: RegionIds, image_positions: int = IMAGE_POSITIONS
) -> PackedTasks:
    """One row per scene, `length` wide. A task that no longer fits is left out whole."""
    packed = _empty(len(encoded), length)
    for row, tasks in enumerate(encoded):
        start = 0
        for index, task in enumerate(tasks):
            end = start + task.num_inputs
            if end > length:
                packed.num_dropped += 1
                continue
            _write(packed, row, slice(start, end), task, ids)
            first = image_positions if task.sees_image else 0
            packed.position[row, start:end] = np.arange(first, first + end - start)
            packed.task[row, start:end] = index
            packed.sees_image[row, start:end] = task.sees_image
            start = end
    return packed


def _empty(rows: int, length: int) -> PackedTasks:
    shape = (rows, length)
    return PackedTasks(
        input_kind=np.zeros(shape, np.int8),
        input_id=np.zeros(shape, np.int32),
        input_value=np.zeros((*shape, 2), np.float32),
        position=np.zeros(shape, np.int32),
        task=np.full(shape, NO_TASK, np.int16),
        sees_image=np.zeros(shape, np.bool_),
        label_id=np.full(shape, NO_LABEL, np.int32),
        label_coord=np.full(shape, NO_VALUE, np.float32),
        label_size=np.full((*shape, 2), NO_VALUE, np.float32),
    )


def _write(packed: PackedTasks, row: int, where: slice, task: EncodedTask, ids: RegionIds) -> None:
    columns = [_column(item, ids) for item in (*task.prompt_items, *task.target_items)]
    kinds, token_ids, values = zip(*columns, strict=True)
    packed.input_kind[row, where] = kinds[:-1]
    packed.input_id[row, where] = token_ids[:-1]
    packed.input_value[row, where] = values[:-1]
    # The last prompt item is the first that has something to foretell.
    num_labels = len(task.target_items)
    labelled = slice(where.stop - num_labels, where.stop)
    packed.label_id[row, labelled] = token_ids[-num_labels:]
    label_kinds = np.array(kinds[-num_labels:])
    label_values = np.array(values[-num_labels:], np.float32)
    packed.label_coord[row, labelled] = np.where(label_kinds == COORD, label_values[:, 0], NO_VALUE)
    packed.label_size[row, labelled] = np.where(label_kinds[:, None] == SIZE, label_values, NO_VALUE)


def _column(item: ContextItem | Token, ids: RegionIds) -> tuple[int, int, tuple[float, float]]:
    """Kind, id and value of one input."""
    if isinstance(item, CoordToken):
        return COORD, ids.coord, (item.value, 0.0)
    if isinstance(item, SizeToken):
        return SIZE, ids.size, (item.width, item.height)
    if isinstance(item, ImageSpan):
        raise ValueError("a picture stands inside a task's prompt; only the one in front of all tasks can be packed")
    return TEXT, item.id, (0.0, 0.0)
