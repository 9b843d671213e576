"""Training feeds what the engine feeds: the same ids, the same stream, and the engine's own answers as right ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.moondream.decoder import adapter_shape
from kestrel.moondream.prompts import moondream_profile
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken
from kestrel.train.adapter.encoding import SampleEncoder
from kestrel.train.adapter.loop import Factors
from kestrel.train.adapter.samples import DataError, MistakeList
from kestrel.train.objective import TaskTensors, hidden_states
from kestrel.train.packing import pack
from tests.moondream.coarse import POSITIONS
from tests.moondream.naive_generator import NaiveGenerator
from tests.scene import SCENE

from .data_folder import draw_picture, read, write_lines
from .runs import options, task_of

ROWS = [
    {"image": "a.png", "question": "is it red?", "answer": "yes it is"},
    {"image": "a.png", "caption": "a red cat", "length": "long"},
    {"image": "a.png", "object": "cat", "points": [[0.5, 0.25], [0.125, 0.75]]},
    {"image": "a.png", "object": "cat", "boxes": [[0.25, 0.25, 0.5, 0.75]]},
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw_picture(tmp_path / "a.png", 0)
    write_lines(tmp_path / "train.jsonl", ROWS)
    return tmp_path


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_prompts_are_the_templates_around_the_words_and_answers_end_with_the_end_id(family: str, data: Path) -> None:
    _, (row,), _, loaded = task_of(options(data, data / "x.safetensors", family, val_share=0.0))
    ids = loaded.config.tokenizer

    def words(text: str) -> list[TextToken]:
        return [TextToken(token_id) for token_id in loaded.tokenizer.encode(text)]

    def around(skill: str, text: str) -> list[TextToken]:
        template = ids.templates[skill]
        return [*map(TextToken, template.prefix), *words(text), *map(TextToken, template.suffix)]

    query, caption, point, detect = row.tasks
    end = TextToken(ids.eos_id)
    opened = [*map(TextToken, ids.templates["query"].prefix), *words("is it red?")]
    assert list(query.prompt_items) == [*opened, *map(TextToken, loaded.config.generation.query_answer_opener)]
    assert list(query.target_items) == [*words("yes it is"), end]
    assert list(caption.prompt_items) == around("caption.long", "")
    assert list(caption.target_items) == [*words("a red cat"), end]
    assert list(point.prompt_items) == around("point", " cat")
    coords = [CoordToken(value) for value in (0.5, 0.25, 0.125, 0.75)]
    assert list(point.target_items) == [*coords, end]
    assert list(detect.prompt_items) == around("detect", " cat")
    assert list(detect.target_items) == [CoordToken(0.375), CoordToken(0.5), SizeToken(0.25, 0.5), end]


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_the_adapted_stream_is_that_of_one_sequence_fed_step_by_step(family: str, data: Path) -> None:
    """The naive generator pages, packs and batches nothing; its truth is the reference implementation's."""
    chosen = options(data, data / "x.safetensors", family, val_share=0.0)
    task, (row,), _, loaded = task_of(chosen)
    factors = Factors(adapter_shape(loaded.config.text), chosen.matrices, chosen.rank, 3.0)
    with torch.no_grad():
        for factor in factors.parameters():
            factor.add_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
        adapt = task.adapt(factors.adapter())
        packed = TaskTensors.upload(pack([row.tasks], 64, task._ids, POSITIONS), torch.device("cpu"))
        together = hidden_states(loaded.model, task._pictures.batch([0]), packed, adapt)[0]
        assert (together - hidden_states(loaded.model, task._pictures.batch([0]), packed)[0]).abs().max() > 0.1
    naive = NaiveGenerator(loaded.model, loaded.config, loaded.tokenizer, adapt=adapt)
    pixels = task._pictures._folder.read(task._pictures._pictures[0]).pixels
    span = ImageSpan("ab" * 8, POSITIONS, bos_id=loaded.config.tokenizer.bos_id)
    at = 0
    for one in row.tasks:
        inputs = [*one.prompt_items, *one.target_items][:-1]
        alone = naive.prefill([span, *inputs], {span.digest: pixels}).last.hidden_D
        torch.testing.assert_close(together[at + len(inputs) - 1], alone, atol=1e-3, rtol=0)
        at += len(inputs)


async def _answers() -> list[dict[str, Any]]:
    """What kestrel-tiny says through the engine, as rows of training."""
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=300)) as engine:
        rows: list[dict[str, Any]] = []
        for question in ("What is in the picture?", "How many cats are there?"):
            said = await engine.query(SCENE, question, reasoning=False)
            rows.append({"question": question, "answer": said.output["answer"]})
        said = await engine.caption(SCENE, length="short")
        rows.append({"caption": said.output["caption"], "length": "short"})
        found = (await engine.point(SCENE, "object")).output["points"]
        assert len(found) > 1
        rows.append({"object": "object", "points": [[point["x"], point["y"]] for point in found]})
        found = (await engine.detect(SCENE, "object")).output["objects"]
        boxes = [[box[side] for side in ("x_min", "y_min", "x_max", "y_max")] for box in found]
        rows.append({"object": "object", "boxes": [[min(max(v, 0.0), 1.0) for v in box] for box in boxes]})
        return [{"image": "scene.png", **row} for row in rows]


@pytest.mark.exhaustive
def test_what_the_engine_says_is_what_training_would_call_right(tmp_path: Path) -> None:
    """Every token that the engine chose is the likeliest one in training, at every position."""
    (tmp_path / "scene.png").write_bytes(SCENE.read_bytes())
    write_lines(tmp_path / "train.jsonl", asyncio.run(_answers()))
    chosen = options(tmp_path, tmp_path / "x.safetensors", model_path=None, rank=4, val_share=0.0)
    task, rows, _, loaded = task_of(chosen)
    untrained = Factors(adapter_shape(loaded.config.text), chosen.matrices, 4, 4.0).adapter()
    with torch.no_grad():
        found, num_labels = task.losses(rows, task.adapt(untrained))
    assert num_labels > 25
    assert found.token_accuracy.item() == 1.0
    assert found.text.item() < 0.3


def test_tasks_of_a_picture_share_rows_as_far_as_they_fit(data: Path) -> None:
    chosen = options(data, data / "x.safetensors", val_share=0.0)
    (row,) = task_of(chosen)[1]
    lengths = [task.num_inputs for task in row.tasks]
    loaded = task_of(chosen)[3]
    encoder = SampleEncoder(moondream_profile(loaded.config, loaded.tokenizer, "x"), lengths[0] + lengths[1])
    samples = read(data, val_share=0.0).train
    rows = encoder.rows(samples, {samples[0].picture.digest: 0}, MistakeList())
    assert [task for each in rows for task in each.tasks] == list(row.tasks)
    assert rows[0].tasks == row.tasks[:2]


def test_what_does_not_fit_or_is_not_offered_is_named_by_line(data: Path) -> None:
    write_lines(
        data / "train.jsonl",
        [*ROWS, {"image": "a.png", "caption": "x", "length": "epic"}, {"image": "a.png", "object": "c", "polygon": []}],
    )
    with pytest.raises(DataError) as caught:
        task_of(options(data, data / "x.safetensors", "md2", val_share=0.0, length=8))
    text = str(caught.value)
    assert "train.jsonl line 1: query: takes" in text
    assert "at most 8 fit; shorten it or raise --length" in text
    assert "train.jsonl line 5: length: 'epic' is not known to md2; use one of: short, normal, long" in text
    assert "train.jsonl line 6: skill: segment is not supported by md2" in text
