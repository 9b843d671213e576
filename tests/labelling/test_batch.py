"""A batch answers every line once, in order, as the server would, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai.types as openai_types
import openai.types.chat as openai_chat
import pytest
import torch

from kestrel.errors import ConfigError, EngineStopped, NotServing
from kestrel.labelling import batch
from kestrel.labelling.batch import Answerer, BatchJob, Counts, over_engine, over_http
from kestrel.labelling.batch_lines import COMPLETION, BatchInput, PromptOptions
from kestrel.server import lifecycle
from kestrel.server.config import ServerConfig
from tests.llama.chat_shapes import CHATML
from tests.llama.tiny_folders import write_folder
from tests.server.conftest import SCENE_URL, runtime_config, start_server
from tests.server.tiny import tiny_engine

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_delays_and_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(batch, "LONGEST_DELAY_S", 0.002)
    monkeypatch.setattr(lifecycle, "warm_up", AsyncMock(return_value=0.0))


def request_line(custom_id: str, url: str = CHAT, body: Any = HELLO, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changes}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def numbered(path: Path, number: int) -> Path:
    return write_lines(path, *(request_line(f"r{index}", body={"index": index}) for index in range(number)))


@contextmanager
def opened(source: Path, output: Path, model: str = "a", **options: Any) -> Iterator[BatchJob]:
    with (
        BatchInput.open(source, PromptOptions(**options)) as lines,
        BatchJob.open(lines, output, {"model": model}) as job,
    ):
        yield job


def written(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@asynccontextmanager
async def stub(answer: Callable[[httpx.Request], Any]) -> AsyncIterator[Answerer]:
    """A server that is a function."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://stub") as client:
        yield Answerer(client)


async def run(source: Path, output: Path, answer: Callable[[httpx.Request], Any], **options: Any) -> Counts:
    with opened(source, output) as job:
        async with stub(answer) as answerer:
            await job.run(answerer, options.pop("concurrency", 4), **options)
        job.write()
        return job.counts


def index_in(request: httpx.Request) -> int:
    return json.loads(request.content)["index"]


def echo(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"echo": index_in(request)}, headers={"x-request-id": "abc"})


# ---------------------------------------------------------------------- what lines say


async def test_answers_are_in_the_order_of_the_lines_and_at_most_so_many_are_asked_at_once(tmp_path: Path) -> None:
    running, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(7 * index_in(request) % 5):
            await asyncio.sleep(0)
        running -= 1
        return echo(request)

    told: list[Counts] = []
    source, output = numbered(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    await run(source, output, answer, concurrency=5, told=told.append)
    lines = written(output)
    assert [(line["custom_id"], line["response"]["body"]["echo"]) for line in lines] == [
        (f"r{i}", i) for i in range(40)
    ]
    assert lines[0]["response"] == {"status_code": 200, "request_id": "abc", "body": {"echo": 0}}
    assert lines[0].keys() == {"id", "custom_id", "response", "error"}
    assert len({line["id"] for line in lines}) == 40
    assert (most, told[-1]) == (5, Counts(40, 40, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.journal"]


BAD = [
    ("{", None, "is not JSON"),
    ("[1]", None, "must be a JSON object or a text"),
    ('{"prompt": "a", "prompt": "b"}', None, "'prompt' is given twice"),
    ({"custom_id": 7, "prompt": "a"}, None, "custom_id: must be a text"),
    ({"prompt": ["a"], "custom_id": "p"}, "p", "prompt: must be a text"),
    ({"prompt": "a", "image": "b.png"}, None, "image: cannot be used together with a prompt"),
    ({"question": "a"}, None, "custom_id: is missing; a request has custom_id, method, url, body, or a prompt"),
    (request_line("m", method="GET"), "m", "method: must be POST"),
    (request_line("u", url="http://elsewhere/v1/query"), "u", "url: must be a path"),
    (request_line("v", url="//elsewhere/v1/query"), "v", "url: must be a path"),
    (request_line("b", body="text"), "b", "body: must be an object"),
    (request_line("k", priority=1), "k", "priority: is not known"),
    (f'{{"custom_id": "n", "method": "POST", "url": "/v1/x", "body": {"[" * 300}{"]" * 300}}}', "n", "body: must be"),
    (
        f'{{"custom_id": "o", "method": "POST", "url": "/v1/x", "body": {{"a": {"[" * 300}{"]" * 300}}}}}',
        "o",
        "too deep",
    ),
    (request_line("s", body={**HELLO, "stream": True}), "s", "body.stream: a batch has nobody to stream to"),
]


async def test_a_bad_line_is_one_error_with_its_number_and_the_others_are_answered(tmp_path: Path) -> None:
    lines = ["\ufeff" + json.dumps(request_line("first", body={"index": 0})), "", *(line for line, _, _ in BAD)]
    source = write_lines(tmp_path / "in.jsonl", *lines, "  ", request_line("last", body={"index": 1}))
    counts = await run(source, tmp_path / "out.jsonl", echo)
    assert counts == Counts(len(BAD) + 2, 2, len(BAD))
    first, *bad, last = written(tmp_path / "out.jsonl")
    assert (first["custom_id"], last["custom_id"], last["error"]) == ("first", "last", None)
    for number, (line, (_, custom_id, message)) in enumerate(zip(bad, BAD, strict=True), start=3):
        assert (line["custom_id"], line["response"]) == (custom_id, None)
        assert line["error"]["message"].startswith(f"line {number}: ")
        assert message in line["error"]["message"]
        assert line["error"]["code"] == ("stream_not_supported" if custom_id == "s" else "invalid_line")


async def test_plain_prompts_become_requests_of_the_route_that_is_wanted(tmp_path: Path) -> None:
    asked: dict[str, tuple[str, Any]] = {}

    def note(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked[body.get("prompt") or body["messages"][0]["content"]] = (request.url.path, body)
        return httpx.Response(200, json={})

    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 1, "custom_id": "A"}, '"b: c"')
    texts = write_lines(tmp_path / "in.txt", '{"prompt": "a"}', "", "  d")
    for path, options in ((source, {}), (texts, {"url": COMPLETION, "body": {"max_tokens": 9}})):
        with opened(path, Path(f"{path}.out"), **options) as job:
            async with stub(note) as answerer:
                await job.run(answerer, 2)
            job.write()
    ids = [[line["custom_id"] for line in written(Path(f"{path}.out"))] for path in (source, texts)]
    assert ids == [["A", "line-2"], ["line-1", "line-3"]]
    assert asked == {
        "a": (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        "b: c": (CHAT, {"messages": [{"role": "user", "content": "b: c"}]}),
        '{"prompt": "a"}': (COMPLETION, {"prompt": '{"prompt": "a"}', "max_tokens": 9}),
        "d": (COMPLETION, {"prompt": "d", "max_tokens": 9}),
    }


def test_a_custom_id_that_stands_twice_is_a_mistake_in_the_input(tmp_path: Path) -> None:
    lines = [request_line(f"r{index % 7}") for index in range(14)] + [{"prompt": "a", "custom_id": "line-16"}, '"b"']
    with pytest.raises(ConfigError, match=r"'r0' on lines 1 and 8; .*'r4' on lines 5 and 12, and 3 more; give every"):
        BatchInput.open(write_lines(tmp_path / "in.jsonl", *lines))


def test_an_input_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in\.jsonl does not exist"):
        BatchInput.open(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="is not a regular file"):
        BatchInput.open(tmp_path)
    with pytest.raises(ConfigError, match="has no lines"):
        BatchInput.open(write_lines(tmp_path / "in.jsonl", "", " "))


# ---------------------------------------------------------------------- going on


async def test_a_later_run_asks_what_has_no_answer_and_what_failed(tmp_path: Path) -> None:
    source, output = numbered(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    asked: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(index_in(request))
        if asked == [0, 1, 2, 3]:
            raise RuntimeError("the program breaks")
        return httpx.Response(400, json={}) if asked[-1] == 1 and len(asked) < 4 else echo(request)

    with pytest.raises(RuntimeError):
        await run(source, output, answer, concurrency=1)
    assert not output.exists()
    asked.append(-1)
    assert await run(source, output, answer, concurrency=1) == Counts(6, 6, 0)
    assert asked[5:] == [1, 3, 4, 5]
    assert [line["response"]["body"]["echo"] for line in written(output)] == list(range(6))
    before = output.read_bytes()
    assert await run(source, output, answer) == Counts(6, 6, 0)
    assert (asked[9:], output.read_bytes()) == ([], before)


async def test_another_input_and_another_model_are_noticed(tmp_path: Path) -> None:
    source, output = numbered(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    await run(source, output, echo)
    refused = pytest.raises(ConfigError, match=r"answers of = \{'model': 'a'\}, not \{'model': 'b'\}")
    with refused, opened(source, output, "b"):
        pass
    numbered(source, 3)
    with pytest.raises(ConfigError, match="is of a run with SHA-256 of the input = "), opened(source, output):
        pass
    Path(f"{output}.journal").unlink()
    with pytest.raises(ConfigError, match="is there already, and not of this batch"), opened(source, output):
        pass


# ---------------------------------------------------------------------- trouble on the way


async def test_refusals_for_now_and_lost_connections_are_tried_again(tmp_path: Path) -> None:
    troubles = iter((429, 503, None, 502, 504))
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["x-request-id"])
        status = next(troubles, 200)
        if status is None:
            raise httpx.ReadError("cut off")
        return echo(request) if status == 200 else httpx.Response(status, headers={"retry-after": "5"})

    warnings: list[str] = []
    source = numbered(tmp_path / "in.jsonl", 1)
    assert await run(source, tmp_path / "out.jsonl", answer, warn=warnings.append) == Counts(1, 1, 0)
    assert (len(asked), len(set(asked)), len(warnings)) == (6, 1, 1)


async def test_a_line_that_is_refused_to_the_end_keeps_its_refusal(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, text="full") if index_in(request) == 1 else echo(request)

    source = numbered(tmp_path / "in.jsonl", 3)
    assert await run(source, tmp_path / "out.jsonl", answer, retry_for_s=0.01) == Counts(3, 2, 1)
    assert written(tmp_path / "out.jsonl")[1]["response"] == {"status_code": 503, "request_id": "", "body": "full"}


async def test_a_line_that_loses_every_connection_costs_itself_and_a_dead_endpoint_ends_the_run(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if index_in(request) == 0:
            raise httpx.ReadError("cut off")
        return echo(request)

    source, output = numbered(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    assert await run(source, output, answer, retry_for_s=0.05) == Counts(3, 2, 1)
    error = written(output)[0]["error"]
    assert error == {"code": "no_response", "message": "line 1: ReadError: cut off"}
    with pytest.raises(NotServing, match="http://stub does not answer: ReadError: cut off"):
        await run(source, output, answer, retry_for_s=0.01)
    assert written(output)[0]["error"] == error


async def test_a_refused_key_ends_the_run(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 3)
    with pytest.raises(ConfigError, match="--api-key: the endpoint refuses it"):
        await run(source, tmp_path / "out.jsonl", lambda request: httpx.Response(401, json={"error": "no"}))


# ---------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("text") / "tiny-llama", "llama", num_layers=1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": CHATML}))
    return folder


def without_times_and_hits(line: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in line["response"]["body"].items() if name not in ("created", "usage")}
    return {**line, "response": {**line["response"], "body": body}}


def with_rounding(line: dict[str, Any]) -> dict[str, Any]:
    """The rest of a batch changes the last bits of an embedding."""
    body = line["response"]["body"]
    if "data" not in body:
        return line
    data = [{**entry, "embedding": pytest.approx(entry["embedding"], abs=1e-6)} for entry in body["data"]]
    return {**line, "response": {**line["response"], "body": {**body, "data": data}}}


async def test_an_engine_and_a_server_give_the_same_answers_in_the_forms_of_openai(
    tmp_path: Path, text_model: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        request_line("chat", body={**HELLO, "model": "tiny-llama", "n": 2}),
        request_line("completion", COMPLETION, {"prompt": ["a", "b"], "max_tokens": 3, "temperature": 0}),
        request_line("embedding", "/v1/embeddings", {"input": "a"}),
        {"prompt": "Hello", "max_tokens": 4, "temperature": 0},
        request_line("wrong", body={**HELLO, "temperature": 9}),
    )
    config, key = runtime_config(model_path=text_model, max_batch_size=2), "a-key"
    serving = start_server(ServerConfig(port=0, api_keys=(key,)), config)
    server = next(serving)
    try:
        with opened(source, tmp_path / "served.jsonl") as job:
            async with over_http(f"{server.url}/v1/", key, 8) as answerer:
                await job.run(answerer, 8)
            job.write()
    finally:
        serving.close()
    engine = await batch.InferenceEngine.create(config)
    with opened(source, tmp_path / "here.jsonl") as job:
        async with engine, over_engine(engine) as answerer:
            await job.run(answerer, 8)
        job.write()
    here = written(tmp_path / "here.jsonl")
    served = written(tmp_path / "served.jsonl")
    assert [without_times_and_hits(line) for line in here] == [
        with_rounding(without_times_and_hits(line)) for line in served
    ]
    chat, completion, embedding, prompt, wrong = (line["response"]["body"] for line in here)
    assert len(openai_chat.ChatCompletion.model_validate(chat).choices) == 2
    assert len(openai_types.Completion.model_validate(completion).choices) == 2
    assert openai_types.CreateEmbeddingResponse.model_validate(embedding).data[0].embedding
    assert prompt["choices"][0]["message"] == chat["choices"][0]["message"]
    assert [line["response"]["status_code"] for line in here] == [200, 200, 200, 200, 400]
    assert wrong["error"]["param"] == "temperature"


async def test_pictures_are_asked_about_by_every_route_and_an_engine_that_dies_ends_the_run(tmp_path: Path) -> None:
    question = {"type": "image_url", "image_url": {"url": SCENE_URL}}, {"type": "text", "text": "What is this?"}
    source = write_lines(
        tmp_path / "in.jsonl",
        request_line("detect", "/v1/detect", {"image_url": SCENE_URL, "object": "gear", "priority": -1}),
        request_line("chat", body={"messages": [{"role": "user", "content": question}], "max_tokens": 5}),
        request_line("named", body={**HELLO, "model": "gpt-4o-mini"}),
    )
    output = tmp_path / "out.jsonl"
    async with tiny_engine() as engine:
        with opened(source, output) as job:
            async with over_engine(engine, model_names=["gpt-4o-mini"]) as answerer:
                await job.run(answerer, 8)
            job.write()
        detect, chat, named = (line["response"] for line in written(output))
        assert [detect["status_code"], chat["status_code"], named["status_code"]] == [200, 200, 200]
        assert "objects" in detect["body"]
        assert chat["body"]["usage"]["prompt_tokens"] > 700
        assert named["body"]["model"] == "gpt-4o-mini"
        with opened(source, tmp_path / "other.jsonl") as job:
            async with over_engine(engine) as answerer:
                engine.fail(RuntimeError("the device is gone"))
                with pytest.raises(EngineStopped, match="the device is gone"):
                    await job.run(answerer, 8)
            assert job.counts == Counts(3, 0, 1)  # the model's name is not known this time
