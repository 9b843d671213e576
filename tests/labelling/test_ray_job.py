"""Labelling on a cluster: the rows of one machine, whoever makes them. Ray itself only with --exhaustive."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.integrations import ray_data
from kestrel.integrations.ray_data import ActorEngine
from kestrel.labelling import LabelTask, Row
from kestrel.labelling import ray_job as module
from kestrel.labelling.job import Done, Wanted, open_journal
from kestrel.labelling.ray_job import (
    Chunk,
    LabelPredictor,
    RayCluster,
    RayJob,
    _cause,
    calls_and_size,
    chunks,
    engines_for,
)
from kestrel.labelling.sources import SourceOptions
from tests.labelling.test_label_job import Canned, folder_of, labelled, many
from tests.moondream.coarse import coarse_folder

TASK = LabelTask(objects=("gear",))


class CannedEngine(Canned):
    max_batch_size = 4


async def made(sources: list[str], monkeypatch: pytest.MonkeyPatch, done: Done, **options: Any) -> list[Chunk]:
    """What would come back from a cluster: listed, pickled, labelled, pickled."""

    async def start(_: ActorEngine) -> CannedEngine:
        return CannedEngine()

    monkeypatch.setattr(ActorEngine, "_start", start)
    monkeypatch.setattr(module, "EngineAsker", lambda engine, num_requests: engine)
    predictor = LabelPredictor(TASK, None, 4, sources)  # type: ignore[arg-type]
    wanted = Wanted(sources, SourceOptions(), TASK, options.get("limit"))
    got: list[Chunk] = []
    for chunk in chunks(wanted, done, 4, pickle.dumps):
        async for batch in predictor({"chunk": [chunk]}):
            got += [pickle.loads(data) for data in batch["chunk"]]
    return got


def rows_in(got: list[Chunk]) -> list[Row]:
    return sorted((row for chunk in got for row, _ in chunk.answers), key=lambda row: row.key)


async def test_a_cluster_makes_the_rows_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = folder_of(tmp_path / "in", many(10))
    (tmp_path / "in" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("a.png", b"\x09z")
    table = tmp_path / "rows.jsonl"
    table.write_text(json.dumps({"image": "in/0001.png", "objects": ["nut"], "shelf": 3}) + "\n{}\n")
    for source in (pictures, str(tmp_path / "more.zip"), str(table)):
        alone = await labelled(source, tmp_path / f"out{len(source)}", Canned())
        together = await made([source], monkeypatch, Done(()))
        assert rows_in(together) == sorted(alone, key=lambda row: row.key)
        assert all(len(chunk.answers) <= 4 and not chunk.items for chunk in together)


async def test_what_is_done_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "in", {**many(9), "notes.md": b""})
    keys = [f"{source}/{name}" for name in sorted(many(9))]
    got = await made([source], monkeypatch, Done(frozenset(keys[:7]), keys[5:9]))
    assert [row.key for row in rows_in(got)] == keys[7:]
    assert (got[-1].num_met, got[-1].num_errors_met) == (7, 2)
    assert got[-1].notes is not None
    assert sum(got[-1].notes.counts.values()) == 1
    got = await made([source], monkeypatch, Done(frozenset(keys)))
    assert [(chunk.answers, chunk.num_met) for chunk in got] == [([], 9)]
    got = await made([source], monkeypatch, Done(frozenset(keys[:3])), limit=5)
    assert [row.key for row in rows_in(got)] == keys[3:5]


async def test_a_chunk_ends_before_pictures_that_travel_with_it_grow_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for name, data in many(6).items():
            archive.writestr(name, data * 50)
    monkeypatch.setattr(module, "CHUNK_BYTES", 150)
    got = await made([str(tmp_path / "in.zip")], monkeypatch, Done(()))
    assert [len(chunk.answers) for chunk in got] == [2, 2, 2, 0]


def test_sources_that_a_machine_of_the_cluster_does_not_have_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SOURCE: .*nowhere is not on .* file system that all machines share"):
        LabelPredictor(TASK, None, 4, ["s3://b/x", str(tmp_path / "nowhere")])  # type: ignore[arg-type]


def test_clusters_are_refused_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray: needs Ray.*pip install -e '\.\[ray\]'"):
        RayCluster("auto")
    monkeypatch.setattr(ray_data, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="ray: ray://head:10001 is not the address of a cluster"):
        RayCluster("ray://head:10001")
    with pytest.raises(ConfigError, match="ray_engines: must be at least 1"):
        RayCluster("auto", 0)


def test_an_engines_error_is_told_without_what_ray_wraps_around_it() -> None:
    inner, outer = ConfigError("adapter", "is not there"), RuntimeError("in a task")
    outer.cause = RuntimeError("in user code")  # type: ignore[attr-defined]
    outer.cause.__cause__ = inner  # type: ignore[attr-defined]
    assert _cause(outer) is inner
    assert _cause(inner) is inner
    other = ValueError("of Ray")
    assert _cause(other) is other


@pytest.mark.parametrize(
    ("settings", "gpus", "wanted", "expected"),
    [
        ({}, [], None, (1, 0)),
        ({}, [], 3, (3, 0)),
        ({}, [0, 4, 2], None, (6, 1)),
        ({}, [0, 4], 2, (2, 1)),
        ({"device": "cpu"}, [4], None, (1, 0)),
        ({"device": "cpu", "tensor_parallel_size": 2}, [4], 3, (3, 0)),
        ({"device": "cuda", "tensor_parallel_size": 2}, [3, 3, 1], None, (2, 2)),
        ({"tensor_parallel_size": 2}, [0], None, (1, 0)),
        ({"device": "cuda"}, [0], 2, (2, 1)),
    ],
)
def test_an_engine_has_the_gpus_of_its_model(
    settings: dict[str, Any], gpus: list[int], wanted: int | None, expected: tuple[int, int]
) -> None:
    """The last one waits for machines that the cluster adds."""
    assert engines_for(RuntimeConfig(**settings), gpus, wanted) == expected


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"tensor_parallel_size": 2}])
def test_a_cluster_without_enough_gpus_on_a_machine_is_refused(settings: dict[str, Any]) -> None:
    gpus = [0] if "device" in settings else [1, 1, 1]
    words = rf"ray: an engine needs {1 if 'device' in settings else 2} GPUs of one machine.* {max(gpus)};.*device cpu"
    with pytest.raises(ConfigError, match=words):
        engines_for(RuntimeConfig(**settings), gpus, None)


@pytest.mark.parametrize(("num_requests", "expected"), [(1, (1, 1)), (2, (2, 1)), (3, (2, 1)), (32, (2, 16))])
def test_no_more_pictures_are_in_progress_than_asked_for(num_requests: int, expected: tuple[int, int]) -> None:
    assert calls_and_size(num_requests) == expected


def test_a_job_on_a_cluster_refuses_one_named_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: object())
    source, cluster = folder_of(tmp_path / "in", many(1)), RayCluster("local")
    journal = open_journal(tmp_path / "out", TASK, "some model", [source], SourceOptions())
    with journal as opened, pytest.raises(ConfigError, match="device: names one GPU, and Ray gives each engine its"):
        RayJob([source], TASK, opened, cluster, RuntimeConfig(device="cuda:1"), options=SourceOptions())


# ---------------------------------------------------------------------- with Ray


ON_A_CPU = """
import asyncio, pathlib, ray, sys, time
from kestrel.config import RuntimeConfig
from kestrel.labelling import LabelTask, ray_job
from kestrel.labelling.job import open_journal
from kestrel.labelling.sources import SourceOptions

folder, model = pathlib.Path(sys.argv[1]), sys.argv[2]
task, sources = LabelTask(objects=("bee",), settings={"max_objects": 1}), [str(folder / "in")]

class Watched(ray_job.LabelPredictor):
    async def _answered(self, asker, part):
        with (folder / f"signs{self._num_requests}").open("a", buffering=1) as file:
            print("+", file=file)
            answered = await ray_job.LabelPredictor._answered(self, asker, part)
            print("-", file=file)
        return answered

async def label(num_requests):
    config = RuntimeConfig(model_path=model, device="cpu", kv_cache_pages=200, max_batch_size=2)
    with open_journal(folder / str(num_requests), task, "coarse", sources, SourceOptions()) as journal:
        cluster = ray_job.RayCluster("local")
        job = ray_job.RayJob(sources, task, journal, cluster, config, num_requests=num_requests)
        assert [row.error async for row in job.rows()] == [None] * 8

ray.init("local", num_cpus=10, num_gpus=3, include_dashboard=False, log_to_driver=False)
shared = ray_job.RayCluster("local").placing(RuntimeConfig(device="cuda", tensor_parallel_size=2), 1)
assert (shared["compute"].min_size, shared["num_gpus"]) == (1, 2), shared
holder = ray.remote(num_gpus=3)(lambda: time.sleep(600)).remote()
while ray.available_resources().get("GPU"):
    time.sleep(0.1)
ray_job.LabelPredictor = Watched
for num_requests in (1, 2):
    asyncio.run(label(num_requests))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_a_job_on_a_cpu_takes_no_gpu_and_asks_as_many_as_told(tmp_path: Path) -> None:
    """There are GPUs by name, and a task holds them all: an engine that wanted one would wait for ever."""
    from tests.scene import turned_scenes  # noqa: PLC0415

    scenes = turned_scenes()
    folder_of(tmp_path / "in", {f"{index}.png": scenes[index % len(scenes)] + b"%d" % index for index in range(8)})
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ON_A_CPU, str(tmp_path), str(coarse_folder("md3"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for num_requests in (1, 2):
        signs = (tmp_path / f"signs{num_requests}").read_text().split()
        assert max(accumulate({"+": 1, "-": -1}[sign] for sign in signs)) == num_requests


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_killed_and_resumed_on_a_cluster_it_leaves_the_files_of_one_machine(tmp_path: Path) -> None:
    from tests.scene import turned_scenes  # noqa: PLC0415

    scenes = turned_scenes()
    folder_of(tmp_path / "in", {f"{index:02}.png": scenes[index % len(scenes)] + b"%d" % index for index in range(60)})
    command = [sys.executable, "-m", "kestrel", "label", str(tmp_path / "in"), "--objects", "bee", "--max-objects", "1"]
    command += ["--model-path", str(coarse_folder("md3")), "--device", "cpu", "--kv-cache-pages", "200"]
    # A score may differ by its last digit with the batch and the number of threads: here both are one.
    command += ["--max-batch-size", "1", "--concurrency", "8", "--format", "jsonl,coco,webdataset"]
    on_ray = [*command, "--output", str(tmp_path / "cluster"), "--ray", "local", "--ray-engines", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def ended(command: list[str]) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    first = subprocess.Popen(on_ray, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "cluster" / "journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 10:
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert journal.read_bytes().count(b"\n") < 60
    ended(on_ray)
    ended([*command, "--output", str(tmp_path / "alone")])
    for name in ("labels.jsonl", "coco/annotations.json", "webdataset/000000.tar", "errors.csv", "classes.txt"):
        assert (tmp_path / "cluster" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
    lines = [(tmp_path / name / "journal.jsonl").read_text().splitlines() for name in ("cluster", "alone")]
    assert sorted(lines[0]) == sorted(lines[1])
