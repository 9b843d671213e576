from __future__ import annotations

from dataclasses import fields
from random import Random

import numpy as np
import pytest

from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, Token
from kestrel.train.packing import COORD, NO_LABEL, NO_TASK, PAD, SIZE, TEXT, PackedTasks, pack
from kestrel.train.tasks.example import EncodedTask, TaskEncoder
from kestrel.train.tasks.mix import TaskMix, sample_tasks

from .made_scenes import profile, random_scene, registry, world

QUESTION = (TextToken(1), TextToken(40), CoordToken(0.25), SizeToken(0.5, 0.75), TextToken(3))
ANSWER = (TextToken(50), CoordToken(0.125), SizeToken(0.25, 0.5), TextToken(0))
TASK = EncodedTask(QUESTION, ANSWER)


def _encoded(num_scenes: int = 30) -> list[list[EncodedTask]]:
    encoder = TaskEncoder(profile(), registry())
    scenes = [random_scene(seed) for seed in range(num_scenes)]
    return [[encoder.encode(e) for e in sample_tasks(s, Random(s.seed), TaskMix(), 6, world())] for s in scenes]


def _unpacked(packed: PackedTasks, row: int, index: int) -> EncodedTask:
    """The task back from the arrays: its inputs, then what its last input is to be followed by."""
    at = np.flatnonzero(packed.task[row] == index)
    inputs = [_item(packed.input_kind[row, p], packed.input_id[row, p], packed.input_value[row, p]) for p in at]
    labelled = [p for p in at if packed.label_id[row, p] != NO_LABEL]
    num_prompt = len(at) - len(labelled) + 1
    targets = [_label(packed, row, int(p)) for p in labelled]
    assert inputs[num_prompt:] == targets[:-1]
    return EncodedTask(tuple(inputs[:num_prompt]), tuple(targets), bool(packed.sees_image[row, at[0]]))


def _item(kind: int, token_id: int, value: np.ndarray) -> Token:
    if kind == COORD:
        assert token_id == 5
        return CoordToken(float(value[0]))
    if kind == SIZE:
        assert token_id == 6
        return SizeToken(float(value[0]), float(value[1]))
    assert kind == TEXT
    return TextToken(int(token_id))


def _label(packed: PackedTasks, row: int, position: int) -> Token:
    coord, size = packed.label_coord[row, position], packed.label_size[row, position]
    kind = COORD if coord >= 0 else SIZE if size[0] >= 0 else TEXT
    value = np.array([coord, 0.0]) if kind == COORD else size
    return _item(kind, packed.label_id[row, position], value)


def _rounded(task: EncodedTask) -> EncodedTask:
    """With values as 32-bit floats keep them."""

    def rounded(item: ContextItem | Token) -> Token:
        if isinstance(item, CoordToken):
            return CoordToken(float(np.float32(item.value)))
        if isinstance(item, SizeToken):
            return SizeToken(float(np.float32(item.width)), float(np.float32(item.height)))
        assert isinstance(item, TextToken)
        return item

    return EncodedTask(
        tuple(map(rounded, task.prompt_items)), tuple(rounded(t) for t in task.target_items), task.sees_image
    )


def test_tasks_come_back_from_the_arrays() -> None:
    encoded = _encoded()
    packed = pack(encoded, 400, profile().regions)
    assert packed.num_dropped == 0
    for row, tasks in enumerate(encoded):
        assert [_unpacked(packed, row, index) for index in range(len(tasks))] == [_rounded(task) for task in tasks]
    assert packed.num_inputs == sum(task.num_inputs for tasks in encoded for task in tasks)


def test_one_task_by_hand() -> None:
    packed = pack([[TASK]], 10, profile().regions)
    assert packed.input_kind.tolist() == [[TEXT, TEXT, COORD, SIZE, TEXT, TEXT, COORD, SIZE, PAD, PAD]]
    assert packed.input_id.tolist() == [[1, 40, 5, 6, 3, 50, 5, 6, 0, 0]]
    assert packed.input_value[0, [2, 3, 6, 7]].tolist() == [[0.25, 0.0], [0.5, 0.75], [0.125, 0.0], [0.25, 0.5]]
    assert packed.label_id.tolist() == [[-100, -100, -100, -100, 50, 5, 6, 0, -100, -100]]
    assert packed.label_coord.tolist() == [[-1, -1, -1, -1, -1, 0.125, -1, -1, -1, -1]]
    assert packed.label_size[0, 6].tolist() == [0.25, 0.5]
    assert np.count_nonzero(packed.label_size[0] >= 0) == 2
    assert packed.position[0, :8].tolist() == list(range(730, 738))
    assert packed.task.tolist() == [[0] * 8 + [NO_TASK] * 2]


def test_positions_start_anew_with_each_task() -> None:
    packed = pack([[TASK, TASK]], 16, profile().regions, image_positions=100)
    assert packed.position.tolist() == [[*range(100, 108), *range(100, 108)]]


def test_a_task_without_a_picture_starts_at_zero_and_does_not_see_it() -> None:
    blind = EncodedTask((TextToken(0), TextToken(3)), (TextToken(50), TextToken(0)), sees_image=False)
    packed = pack([[TASK, blind]], 12, profile().regions)
    assert packed.position[0, 8:11].tolist() == [0, 1, 2]
    assert packed.sees_image.tolist() == [[True] * 8 + [False] * 4]
    assert packed.input_id[0, 8] == 0


def test_a_task_that_does_not_fit_is_left_out_whole_and_a_shorter_one_still_fits() -> None:
    short = EncodedTask((TextToken(3),), (TextToken(50), TextToken(0)))
    packed = pack([[TASK, TASK, short], [short]], 10, profile().regions)
    assert packed.num_dropped == 1
    assert packed.task.tolist() == [[0] * 8 + [2] * 2, [0] * 2 + [NO_TASK] * 8]
    assert [_unpacked(packed, 0, 0), _unpacked(packed, 0, 2)] == [TASK, short]


def test_padding_has_no_label() -> None:
    packed = pack(_encoded(5), 400, profile().regions)
    padding = packed.task == NO_TASK
    assert padding.any()
    assert (packed.input_kind[padding] == PAD).all()
    assert (packed.label_id[padding] == NO_LABEL).all()
    assert (packed.label_coord[padding] == -1).all()
    assert (packed.label_size[padding] == -1).all()


def test_arrays_have_one_shape_and_documented_types() -> None:
    packed = pack(_encoded(3), 300, profile().regions)
    shapes = {f.name: getattr(packed, f.name).shape[:2] for f in fields(packed) if f.name != "num_dropped"}
    assert set(shapes.values()) == {(3, 300)}
    assert packed.input_value.dtype == packed.label_coord.dtype == packed.label_size.dtype == np.float32
    assert packed.input_id.dtype == packed.label_id.dtype == np.int32


def test_a_second_picture_inside_a_prompt_is_refused() -> None:
    task = EncodedTask((TextToken(1), ImageSpan("other", 729)), ANSWER)
    with pytest.raises(ValueError, match="picture"):
        pack([[task]], 20, profile().regions)
