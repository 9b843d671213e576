"""Packed training sees exactly what inference sees: same hidden states as one task at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.random_models import randomise_
from kestrel.skills.base import RegionIds
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken
from kestrel.train.objective import TaskTensors, embed_pictures, hidden_states, smoothed_bin_loss
from kestrel.train.packing import pack
from kestrel.train.tasks.example import EncodedTask
from tests.exhaustive import sweep
from tests.moondream.goldens import config_dict, golden
from tests.moondream.naive_generator import NaiveGenerator

IDS = RegionIds(5, 6, 7, 9)


def task(prompt: list[ContextItem], target: list, sees_image: bool = True) -> EncodedTask:
    return EncodedTask(prompt_items=tuple(prompt), target_items=tuple(target), sees_image=sees_image)


TASKS = [
    task([TextToken(1), TextToken(30), TextToken(3)], [TextToken(40), TextToken(41), TextToken(0)]),
    task([TextToken(1), CoordToken(0.25), TextToken(3)], [CoordToken(0.5), CoordToken(0.75), SizeToken(0.2, 0.4)]),
    task([TextToken(0), TextToken(1), TextToken(33)], [TextToken(44), TextToken(0)], sees_image=False),
]


@pytest.mark.exhaustive
@sweep("size", [(378, 378), (420, 640)], always=[(378, 378)])
def test_every_packed_task_has_the_hidden_states_it_has_alone(size: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    config = MoondreamConfig.from_dict(config_dict("md3")).with_region_ln(True)
    model = randomise_(MoondreamModel(config).eval(), seed=4)
    pixels = np.random.default_rng(2).integers(0, 255, (1, *size, 3), dtype=np.uint8)
    packed = TaskTensors.upload(pack([TASKS], 20, IDS), torch.device("cpu"))
    with torch.inference_mode():
        pictures = embed_pictures(model, torch.from_numpy(pixels), torch.float32)
        together = hidden_states(model, pictures, packed)[0]
    naive = NaiveGenerator(model, config, golden("md3").tokenizer)
    span = ImageSpan("ab" * 8, 730, bos_id=0)
    at = 0
    for one in TASKS:
        inputs = [*one.prompt_items, *one.target_items][:-1]
        context: list[ContextItem] = [span, *inputs] if one.sees_image else list(inputs)
        for count in range(len(inputs)):
            length = len(context) - len(inputs) + count + 1
            alone = naive.prefill(context[:length], {span.digest: pixels[0]}).last.hidden_D
            torch.testing.assert_close(together[at + count], alone, atol=2e-4, rtol=0)
        at += len(inputs)


def test_the_bin_loss_is_smallest_at_the_true_bin() -> None:
    logits = torch.full((1, 1024), -8.0)
    near, far = logits.clone(), logits.clone()
    near[0, 500], far[0, 600] = 4.0, 4.0
    target = torch.tensor([501.0])
    exact = logits.clone()
    exact[0, 501] = 4.0
    losses = [smoothed_bin_loss(each, target).item() for each in (exact, near, far)]
    assert losses[0] < losses[1] < losses[2]


def test_labels_are_listed_with_their_places_and_values() -> None:
    packed = pack([TASKS, TASKS], 20, IDS)
    tensors = TaskTensors.upload(packed, torch.device("cpu"))
    assert torch.equal(tensors.label_id, torch.as_tensor(packed.label_id.reshape(-1)).long()[tensors.label_at])
    assert len(tensors.label_at) == 2 * sum(len(one.target_items) for one in TASKS)
    assert tensors.label_id[tensors.coord_at].tolist() == [IDS.coord] * 4
    assert tensors.coord.tolist() == [0.5, 0.75] * 2
    assert tensors.label_id[tensors.size_at].tolist() == [IDS.size] * 2
    torch.testing.assert_close(tensors.size, torch.tensor([[0.2, 0.4]] * 2))


def test_a_label_weighs_one_over_the_root_of_its_tasks_labels() -> None:
    short = task([TextToken(1)], [TextToken(0)])
    long = task([TextToken(1)], [TextToken(40)] * 15 + [TextToken(0)])
    weights = TaskTensors.upload(pack([[short, long]], 20, IDS), torch.device("cpu")).label_weight
    assert weights[0].item() == pytest.approx(4 * weights[1].item())
    assert weights.mean().item() == pytest.approx(1.0)
