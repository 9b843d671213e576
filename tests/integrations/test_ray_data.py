"""The predictor for Ray Data: what its batches become. Ray itself only where it is installed, with --exhaustive."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, RequestError
from kestrel.integrations import ray_data
from kestrel.integrations.ray_data import ActorEngine, KestrelPredictor, require_ray
from tests.moondream.coarse import coarse_folder
from tests.scene import turned_scenes

CONFIG = RuntimeConfig(model_path=coarse_folder("md3"), device="cpu", kv_cache_pages=200)


class Echo:
    """An engine that answers with what it was asked, and notes how many asked at once."""

    max_batch_size = 2

    def __init__(self) -> None:
        self.num_running = self.most_running = 0

    async def run(self, skill: str, **fields: Any) -> Any:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.001)
        self.num_running -= 1
        for name in ("image", "question", "settings"):
            if fields.get(name) == b"bad" or fields.get(name) == "bad":
                raise RequestError(name, "is bad")
        image = fields.pop("image", b"")
        return SimpleNamespace(output={"skill": skill, "image": image.decode(), **fields})


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    engine = Echo()

    async def start(_: ActorEngine) -> Echo:
        return engine

    monkeypatch.setattr(ActorEngine, "_start", start)
    return engine


def column(*values: Any) -> np.ndarray:
    whole = np.empty(len(values), dtype=object)
    whole[:] = values
    return whole


async def answered(predictor: KestrelPredictor, batch: dict[str, Any]) -> dict[str, Any]:
    (answers,) = [out async for out in predictor(batch)]
    return answers


async def test_a_batch_comes_back_with_answers_in_the_order_of_its_rows(echo: Echo) -> None:
    predictor = KestrelPredictor("query", columns=["question"], fields={"reasoning": False}, image="bytes")
    batch = {"id": np.arange(9), "bytes": column(*[b"%d" % n for n in range(9)]), "question": column(*"abcdefghi")}
    got = await answered(predictor, batch)
    assert set(got) == {"id", "question", "output", "error"}
    outputs = [json.loads(text) for text in got["output"]]
    assert [(one["image"], one["question"]) for one in outputs] == list(zip("012345678", "abcdefghi", strict=True))
    assert all(one["reasoning"] is False for one in outputs)
    assert (got["error"], echo.most_running) == ([""] * 9, 2 * Echo.max_batch_size)


async def test_a_row_at_fault_has_its_reason_and_what_all_share_is_raised(echo: Echo) -> None:
    predictor = KestrelPredictor("query", columns=["question"])
    got = await answered(predictor, {"image": column(b"1", b"bad", b"3"), "question": column("a", "b", "bad")})
    assert got["error"] == ["", "image: is bad", "question: is bad"]
    assert [bool(text) for text in got["output"]] == [True, False, False]
    with pytest.raises(RequestError, match="settings: is bad"):
        await answered(KestrelPredictor("query", fields={"settings": "bad"}), {"image": column(b"1")})


async def test_columns_that_are_not_there_or_given_twice_are_refused(echo: Echo) -> None:
    with pytest.raises(ConfigError, match="columns: the dataset has no 'image', but bytes; name one of these"):
        await answered(KestrelPredictor("caption"), {"bytes": column(b"1")})
    with pytest.raises(ConfigError, match="fields: question is a column too"):
        KestrelPredictor("query", columns=["question"], fields={"question": "why?"})


async def test_answers_are_those_of_the_engine() -> None:
    predictor = KestrelPredictor("caption", config=CONFIG, fields={"settings": {"temperature": 0, "max_tokens": 4}})
    first, second = turned_scenes()[:2]
    together, alone = await asyncio.gather(
        answered(predictor, {"image": column(first, b"damaged")}), answered(predictor, {"image": column(second)})
    )
    engine = await predictor._actor.get()
    for got, data in ((together, first), (alone, second)):
        wanted = await engine.caption(data, settings={"temperature": 0, "max_tokens": 4})
        assert json.loads(got["output"][0]) == wanted.output
    assert "not a picture" in together["error"][1]
    await predictor.close()


async def test_a_skill_that_the_model_lacks_is_refused_when_the_engine_starts() -> None:
    with pytest.raises(RequestError, match="paint"):
        await answered(KestrelPredictor("paint", config=CONFIG), {"image": column(b"1")})


def test_without_ray_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray: needs Ray.*pip install -e '\.\[ray\]'"):
        require_ray("ray")


# ---------------------------------------------------------------------- with Ray

PIPELINE = """
import sys, pyarrow, pyarrow.parquet, ray
from kestrel.config import RuntimeConfig
from kestrel.integrations.ray_data import KestrelPredictor
from ray.data.checkpoint import CheckpointConfig
from tests.scene import turned_scenes

folder, model = sys.argv[1:]
ray.init(address="local", num_cpus=8, object_store_memory=80 << 20, log_to_driver=False, include_dashboard=False)
context = ray.data.DataContext.get_current()
context.checkpoint_config = CheckpointConfig(
    id_column="id", checkpoint_path=f"{folder}/checkpoint", delete_checkpoint_on_success=False
)
for num_rows in (8, 16):
    rows = {"id": range(num_rows), "image": turned_scenes()[:1] * num_rows, "question": ["?"] * num_rows}
    pyarrow.parquet.write_table(pyarrow.table(rows), f"{folder}/rows.parquet")
    ray.data.read_parquet(f"{folder}/rows.parquet").repartition(target_num_rows_per_block=4).map_batches(
        KestrelPredictor,
        fn_constructor_kwargs={
            "skill": "query",
            "columns": ["question"],
            "fields": {"reasoning": False, "settings": {"temperature": 0, "max_tokens": 2}},
            "config": RuntimeConfig(model_path=model, device="cpu", kv_cache_pages=200),
        },
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2),
    ).write_parquet(f"{folder}/answers{num_rows}")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_rays_checkpoints_answer_each_row_once(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PIPELINE, str(tmp_path), str(CONFIG.model_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    tables = [parquet.read_table(tmp_path / f"answers{num_rows}").to_pylist() for num_rows in (8, 16)]
    assert [sorted(row["id"] for row in table) for table in tables] == [[*range(8)], [*range(8, 16)]]
    for row in (row for table in tables for row in table):
        assert row["error"] == ""
        assert json.loads(row["output"])["answer"] is not None
