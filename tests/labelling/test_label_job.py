"""A labelling job: every picture one row, asked once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import CapacityError, ConfigError, KestrelError, QueueFull, RequestError, ServerAway, Unauthorised
from kestrel.labelling import LabelJob, LabelTask, OutputPlan, Row, job, label
from kestrel.labelling.askers import Answer, EndpointAsker, EngineAsker
from kestrel.labelling.endpoint import Endpoint
from kestrel.labelling.job import NUM_READERS, READ_AHEAD, open_journal
from kestrel.labelling.outputs import named_faults, rows_of
from kestrel.labelling.sources import SourceOptions
from tests.moondream.coarse import coarse_folder
from tests.scene import turned_scenes

TASK = LabelTask(objects=("gear",))


class Canned:
    """Answers with a box whose side is the picture's first byte; notes what was asked, and how much at once."""

    def __init__(
        self, failing: Mapping[bytes, KestrelError] | None = None, num_requests: int = 4, waits_until_full: bool = False
    ) -> None:
        self.num_requests = num_requests
        self._is_full = asyncio.Event()
        if not waits_until_full:
            self._is_full.set()
        self.asked: list[bytes] = []
        self.names: list[Any] = []
        self.num_running = self.most_running = 0
        self._failing = failing or {}

    async def ask(self, skill: str, image: bytes, fields: Mapping[str, Any]) -> Answer:
        self.asked.append(image)
        self.names.append(fields["object"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == self.num_requests:
            self._is_full.set()
        await asyncio.wait_for(self._is_full.wait(), 60)
        await asyncio.sleep(0.001)
        self.num_running -= 1
        if image in self._failing:
            raise self._failing[image]
        box = {"x_min": 0.0, "y_min": 0.0, "x_max": image[0] / 512, "y_max": 1.5, "label": "gear", "score": 0.98765}
        return Answer({"objects": [box], "image": {"width": 8, "height": 4}}, 700, 3)


def folder_of(path: Path, pictures: Mapping[str, bytes]) -> str:
    for name, data in pictures.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return str(path)


def many(number: int) -> dict[str, bytes]:
    return {f"{index:04}.png": bytes([index % 255 + 1, index // 255]) for index in range(number)}


async def labelled(
    source: str, output: Path, asker: Any, task: LabelTask = TASK, stop_after: int | None = None, **options: Any
) -> list[Row]:
    """The rows of one run, which may be left early."""
    with open_journal(output, task, "canned", [source], SourceOptions()) as journal:
        whole = LabelJob([source], task, journal, lambda: nullcontext(asker), **options)
        got: list[Row] = []
        async with aclosing(whole.rows()) as rows:
            async for row in rows:
                got.append(row)
                if len(got) == stop_after:
                    break
        return got


def remembered(output: Path, task: LabelTask = TASK, source: str = "") -> list[Row]:
    with open_journal(output, task, "canned", [source], SourceOptions()) as journal:
        return list(rows_of(journal))


async def test_runs_that_are_left_anywhere_add_up_to_one_that_is_not(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(30))
    whole = await labelled(source, tmp_path / "whole", Canned())
    asked: list[bytes] = []
    for stop_after in (1, 2, 7, 11, None):
        asker = Canned()
        await labelled(source, tmp_path / "parts", asker, stop_after=stop_after)
        asked += asker.asked
    parts = remembered(tmp_path / "parts", source=source)
    assert parts == sorted(whole, key=lambda row: row.key)
    assert [row.file for row in parts] == sorted(many(30))
    # What was under way when a run was left is asked again, and nothing else.
    assert len(asked) <= 30 + 4 * Canned().num_requests
    assert await labelled(source, tmp_path / "parts", None) == []


async def test_boxes_end_at_the_picture_and_numbers_are_rounded(tmp_path: Path) -> None:
    (row,) = await labelled(folder_of(tmp_path / "in", {"a.png": b"\x55"}), tmp_path / "out", Canned())
    assert (row.width, row.height) == (8, 4)
    assert row.found[0].box == (0.0, 0.0, 0.166016, 1.0)
    assert (row.found[0].label, row.found[0].score) == ("gear", 0.988)


async def test_equal_pictures_are_asked_about_once(tmp_path: Path) -> None:
    pictures = {f"{name}.png": b"same" for name in "abcdef"} | {"other.png": b"other"}
    source = folder_of(tmp_path / "in", pictures)
    rows = await labelled(source, tmp_path / "out", asker := Canned())
    assert sorted(asker.asked) == [b"other", b"same"]
    folder_of(tmp_path / "in", {"late/g.png": b"same"})
    rows += await labelled(source, tmp_path / "out", asker := Canned())
    assert asker.asked == []
    assert sorted(row.file for row in rows) == sorted([*pictures, "late/g.png"])
    assert len({row.found for row in rows if row.file != "other.png"}) == 1


async def test_rows_that_bring_names_of_their_own_are_asked_for_these(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a.png": b"same", "b.png": b"same", "c.png": b"same"})
    rows = [{"image": "a.png", "objects": ["nut", "bolt"]}, {"image": "b.png"}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    await labelled(str(source), tmp_path / "out", asker := Canned())
    assert sorted(map(str, asker.names)) == ["['nut', 'bolt']", "gear"]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {**rows[0], "image": "c.png"}]))
    (late,) = await labelled(str(source), tmp_path / "out", again := Canned())
    assert (again.asked, late.objects) == ([], ("nut", "bolt"))


async def test_from_python_rows_come_one_by_one_and_files_at_the_end(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", {f"{index}.png": data for index, data in enumerate(turned_scenes()[:2])})
    task = LabelTask(objects=("bee",), settings={"max_objects": 1})
    config = RuntimeConfig(model_path=coarse_folder("md3"), device="cpu", kv_cache_pages=200)
    async with await InferenceEngine.create(config) as engine:
        plan = OutputPlan(formats=("coco",), split={"train": 0.5, "val": 0.5})
        rows = [row async for row in label([source], task, engine, output=tmp_path / "out", plan=plan)]
        assert [row async for row in label([source], task, engine, output=tmp_path / "out")] == []
    assert {row.file for row in rows} == {"0.png", "1.png"}
    assert (tmp_path / "out" / "coco" / "val_annotations.json").exists()


async def test_a_bad_picture_is_a_row_with_its_reason(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", {**many(5), "damaged.png": b"damaged", "huge.png": b"huge"})
    (tmp_path / "in" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    failing = {b"damaged": RequestError("image", "is cut short"), b"huge": CapacityError("takes all memory")}
    rows = await labelled(source, tmp_path / "out", Canned(failing))
    errors = {row.file: row.error for row in rows if row.error}
    assert errors.pop("gone.png")
    assert errors == {"damaged.png": "is cut short", "huge.png": "takes all memory"}
    assert sum(row.error is None for row in rows) == 5
    retried = await labelled(source, tmp_path / "out", asker := Canned(), retry_errors=True)
    assert sorted(asker.asked) == [b"damaged", b"huge"]
    assert {row.file for row in retried} == {"damaged.png", "gone.png", "huge.png"}
    assert [row.file for row in remembered(tmp_path / "out", source=source) if row.error] == ["gone.png"]


@pytest.mark.parametrize(
    "error", [RequestError("object", "is too long"), ServerAway("gone"), KestrelError("stopped")], ids=str
)
async def test_what_is_no_picture_s_fault_ends_the_run_and_leaves_no_row(tmp_path: Path, error: KestrelError) -> None:
    source = folder_of(tmp_path / "in", many(5))
    asker = Canned(dict.fromkeys(many(5).values(), error))
    with pytest.raises(type(error), match=str(error)):
        await labelled(source, tmp_path / "out", asker)
    assert remembered(tmp_path / "out", source=source) == []


async def test_a_limit_counts_what_was_labelled_before(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(10))
    await labelled(source, tmp_path / "out", Canned(), limit=4)
    rows = await labelled(source, tmp_path / "out", Canned(), limit=6)
    assert [row.file for row in remembered(tmp_path / "out", source=source)] == sorted(many(6))
    assert len(rows) == 2


async def test_the_journal_keeps_what_a_score_leaves_out(tmp_path: Path) -> None:
    source, task = folder_of(tmp_path / "in", many(3)), LabelTask(objects=("gear",), min_score=0.99)
    assert [row.found for row in await labelled(source, tmp_path / "out", Canned(), task)] == [(), (), ()]
    assert all(len(row.found) == 1 for row in remembered(tmp_path / "out", source=source))


async def test_the_asker_is_kept_full_and_no_more_is_read_than_is_needed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, most_ahead, lock = 0, 0, threading.Lock()
    source, asker = folder_of(tmp_path / "in", many(200)), Canned(num_requests=8, waits_until_full=True)
    read = job.read_picture

    def counted(item: Any) -> Any:
        nonlocal num_read, most_ahead
        with lock:
            num_read += 1
            most_ahead = max(most_ahead, num_read - len(asker.asked))
        return read(item)

    monkeypatch.setattr(job, "read_picture", counted)
    assert len(await labelled(source, tmp_path / "out", asker)) == 200
    assert asker.most_running == 8
    assert most_ahead <= READ_AHEAD + NUM_READERS + 2


async def test_no_model_is_opened_where_nothing_can_be_asked(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(2))
    with pytest.raises(ConfigError, match="objects: is needed by detect"):
        await labelled(source, tmp_path / "out", None, LabelTask())
    with pytest.raises(ConfigError, match="question: is needed by query"):
        await labelled(source, tmp_path / "out", None, LabelTask(task="query"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "detct"}, "did you mean 'detect'"),
        ({"task": "query", "objects": ("gear",)}, "objects: is not for query"),
        ({"objects": ("gear",), "question": "why?"}, "question: is not for detect"),
        ({"objects": ("gear", "gear")}, "objects: must be at most 64 names, each once"),
        ({"objects": ("gear",), "min_score": 2}, "min_score: must be from 0 to 1"),
        ({"task": "caption", "length": "tiny"}, "length: must be one of short, normal, long"),
        ({"objects": ("gear",), "settings": {"max_tokens": 3}}, "max_tokens"),
        ({"objects": ("gear",), "settings": {"temperature": 9}}, "temperature"),
    ],
)
def test_a_task_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        LabelTask(**fields)


async def test_a_full_engine_is_waited_for_and_a_picture_it_can_never_hold_is_not() -> None:
    class Full:
        max_batch_size = 1
        num_calls = 0

        async def run(self, skill: str, **fields: Any) -> Any:
            self.num_calls += 1
            await asyncio.sleep(0)
            raise QueueFull("full")

    asker = EngineAsker(Full())  # type: ignore[arg-type]
    assert asker.num_requests == 2
    asks = [asyncio.create_task(asker.ask("detect", b"", {})) for _ in range(3)]
    for number in range(3):
        with pytest.raises(QueueFull):
            await next(ask for ask in asyncio.as_completed(asks[number:]))
        asks.sort(key=lambda ask: not ask.done())


def test_a_full_disk_and_a_folder_that_cannot_be_written_have_names(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="the disk is full; free some space"), named_faults(tmp_path):
        raise OSError(28, "No space left on device")
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"output: .*file/out cannot be written"),
        named_faults(tmp_path / "file" / "out"),
    ):
        open_journal(tmp_path / "file" / "out", TASK, "canned", [], SourceOptions())
    with pytest.raises(FileNotFoundError), named_faults(tmp_path / "out"):  # of something else
        (tmp_path / "weights").read_bytes()


# ---------------------------------------------------------------------- servers


class Scripted(BaseHTTPRequestHandler):
    """Answers with the statuses of a script, then rightly."""

    script: list[int]
    num_asked: int

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).num_asked += 1
        status = self.script.pop(0) if self.script else 200
        answer = {"objects": [], "image": {"width": 1, "height": 1}, "metrics": {"input_tokens": 1, "output_tokens": 1}}
        error = {"error": {"message": "image_url: no", "param": "image_url", "code": None}}
        body = json.dumps(answer if status == 200 else error).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted(*statuses: int) -> Iterator[tuple[str, type[Scripted]]]:
    handler = type("Handler", (Scripted,), {"script": list(statuses), "num_asked": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.labelling.endpoint.FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("kestrel.labelling.endpoint.LONGEST_WAIT_S", 0.01)


async def test_a_busy_server_is_asked_again_and_a_refusal_is_not(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(1))
    cases: list[tuple[tuple[int, ...], int, str | None]] = [
        ((429, 503, 502, 504, 500, 500), 7, None),
        ((400,), 1, "no"),
        ((413,), 1, "image_url: no"),
        ((500, 503, 500, 408), 4, "the server failed 3 times"),
    ]
    for number, (statuses, num_asked, error) in enumerate(cases):
        with scripted(*statuses) as (url, handler):
            async with Endpoint(url) as endpoint:
                (row,) = await labelled(source, tmp_path / str(number), EndpointAsker(endpoint, 1))
            assert handler.num_asked == num_asked
            assert row.error is None if error is None else error in (row.error or "")


async def test_a_wrong_key_and_a_server_that_stays_away_end_the_run_without_rows(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(3))
    with scripted(401) as (url, _):
        async with Endpoint(url) as endpoint:
            with pytest.raises(Unauthorised, match="give another --api-key"):
                await labelled(source, tmp_path / "out", EndpointAsker(endpoint, 1))
    async with Endpoint(url, patience_s=0.1) as endpoint:
        with pytest.raises(ServerAway, match="has answered nothing for"):
            await labelled(source, tmp_path / "out", EndpointAsker(endpoint))
        with pytest.raises(ServerAway, match="cannot be reached"):
            await endpoint.model_name()
    assert remembered(tmp_path / "out", source=source) == []


async def test_a_server_that_fails_at_every_picture_ends_the_run(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", many(40))
    with scripted(*[500] * 200) as (url, _):
        async with Endpoint(url) as endpoint:
            with pytest.raises(ServerAway, match="fails at every request"):
                await labelled(source, tmp_path / "out", EndpointAsker(endpoint))
    assert len(remembered(tmp_path / "out", source=source)) < 20


def test_an_address_is_checked() -> None:
    for address in ("localhost:8080", "http://", "ftp://host"):
        with pytest.raises(ConfigError, match=r"as in http://127\.0\.0\.1:8080"):
            Endpoint(address)
    assert Endpoint("http://host:8080/v1/").url == "http://host:8080"
