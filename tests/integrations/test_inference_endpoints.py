"""The same requests to NVIDIA's Triton Inference Server with our model, and to our own endpoint of its protocol."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image

from kestrel import default_model
from tests.engine.random_adapters import write_adapters
from tests.integrations.asking import Seen, ask, note, open_stream, tensors
from tests.integrations.endpoints import (
    ROOT,
    Endpoint,
    install_triton,
    launch_triton,
    shared_memory_of,
    start_native,
    start_triton,
)
from tests.integrations.truth import GREEDY, KEYS, Asked, direct_answers, questions
from tests.moondream.coarse import EMBEDDED, coarse_folder
from tests.scene import SCENE
from tests.server.long_request import long_query
from tests.server.sockets import eventually

NUM_STREAMS = 32
NUM_LEAVERS = 6
END_ID = 0  # of the embedded model
PICTURE = SCENE.read_bytes()
METRICS = {"input_tokens", "output_tokens", "prefill_time_ms", "decode_time_ms", "ttft_ms"}
WORDY = {**GREEDY, "suppressed_ids": [END_ID], "max_tokens": 6}
REFS = [[0.2, 0.2, 0.6, 0.6]]
BIG_BYTES = 20 * 2**20


SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "query": ("query", {"image": PICTURE, "question": "What is in this picture?", "settings": WORDY}),
    "thinking": ("query", {"image": PICTURE, "question": "How many bees are there?", "reasoning": True}),
    "text": ("query", {"question": "Who are you?", "settings": {**GREEDY, "max_tokens": 4}}),
    "caption": ("caption", {"image": PICTURE, "length": "short", "settings": WORDY}),
    "point": ("point", {"image": PICTURE, "object": "bee", "settings": {"max_objects": 3}}),
    "detect": ("detect", {"image": PICTURE, "object": "bee", "settings": {"max_objects": 2}}),
    "several": ("detect", {"image": PICTURE, "object": ["bee", "cross"], "settings": {"max_objects": 1}}),
    "segment": ("segment", {"image": PICTURE, "object": "bee", "spatial_refs": REFS, "settings": {"max_tokens": 40}}),
    "outline": ("segment", {"image": PICTURE, "object": "bee"}),
    "adapter": ("query", {"image": PICTURE, "question": "What is it?", "adapter": "a0", "settings": {"max_tokens": 6}}),
}
BIG = "big"
Call = tuple[str, dict[str, Any]]


@lru_cache
def call_of(name: str) -> Call:
    return big_call() if name == BIG else SINGLE[name]


def big_call() -> Call:
    """About a JPEG of 20 MB: what comes after its end is not looked at, but has to be carried."""
    buffer = io.BytesIO()
    with Image.open(SCENE) as scene:
        scene.convert("RGB").save(buffer, "JPEG")
    return "point", {"image": buffer.getvalue().ljust(BIG_BYTES, b"\0"), "object": "bee"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, str(default_model.FOLDER), 1)
    return folder


@pytest.fixture(scope="module")
def truth(endpoint: Endpoint, adapters: Path) -> dict[str, Asked]:
    """The engine's own answers: by name for single requests, by number for the crowd's."""
    is_coarse = endpoint.kind == "native"
    crowd = {str(number): asked for number, asked in enumerate(questions("heart" if is_coarse else "bee"))}
    calls = {**SINGLE, BIG: call_of(BIG), **crowd}
    model = coarse_folder(EMBEDDED) if is_coarse else default_model.FOLDER
    return dict(zip(calls, direct_answers(list(calls.values()), adapters, model), strict=True))


@pytest.fixture(scope="module", params=[pytest.param("triton", marks=pytest.mark.exhaustive), "native"])
def endpoint(
    request: pytest.FixtureRequest, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "triton":
        running = start_triton(folder, adapters)
    else:
        running = start_native(folder, "--adapter-dir", str(adapters))
    try:
        yield running
    finally:
        running.stop()


def same(found: Any, wanted: Any) -> bool:
    """Texts to the letter; numbers up to what the order of additions in a batch changes."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == (pytest.approx(wanted, abs=1e-4) if isinstance(wanted, float) else wanted)


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", [*SINGLE, BIG])
def test_an_answer_is_the_engines_own(endpoint: Endpoint, truth: dict[str, Asked], name: str) -> None:
    skill, fields = call_of(name)
    seen = ask(endpoint.url, skill=skill, request_id=f"test-{name}", **fields)
    body = seen.last
    assert seen.finals == [True]
    assert list(body)[:2] == ["request_id", "finish_reason"]
    assert (body.pop("request_id"), body.pop("finish_reason")) == (f"test-{name}", truth[name].finish_reason)
    assert set(body.pop("metrics")) == METRICS
    assert same(body, json.loads(json.dumps(truth[name].output)))


@pytest.mark.parametrize("name", ["query", "thinking", "caption"])
def test_a_text_streams_in_pieces_that_make_the_whole(endpoint: Endpoint, truth: dict[str, Asked], name: str) -> None:
    skill, fields = SINGLE[name]
    seen = ask(endpoint.url, skill=skill, stream=True, **fields)
    *pieces, last = seen.bodies
    assert seen.finals == [False] * len(pieces) + [True]
    assert [piece["completed"] for piece in pieces] == [False] * len(pieces)
    indices = [piece["token_index"] for piece in pieces]
    assert len(pieces) > 2
    assert indices == sorted(indices)
    assert (last["chunk"], last["completed"], set(last["metrics"])) == ("", True, METRICS)
    thoughts = [piece for piece in pieces if piece.get("type") == "reasoning"]
    texts = [set(piece) for piece in pieces if "type" not in piece]
    assert texts == [{"chunk", "completed", "token_index"}] * (len(pieces) - len(thoughts))
    assert "".join(piece.get("chunk", "") for piece in pieces) == last[KEYS[skill]] == truth[name].output[KEYS[skill]]
    if name == "thinking":
        assert "".join(piece["reasoning"] for piece in thoughts) == last["reasoning"]["text"]


def test_points_stream_one_by_one(endpoint: Endpoint, truth: dict[str, Asked]) -> None:
    skill, fields = SINGLE["point"]
    *pieces, last = ask(endpoint.url, skill=skill, stream=True, **fields).bodies
    assert same([piece["point"] for piece in pieces], truth["point"].output["points"])
    assert same(last["points"], truth["point"].output["points"])
    assert last["completed"]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_a_picture_may_be_base64(endpoint: Endpoint, truth: dict[str, Asked], prefix: str) -> None:
    _, fields = SINGLE["point"]
    text = prefix + base64.b64encode(PICTURE).decode()
    assert same(
        ask(endpoint.url, skill="point", **{**fields, "image": text}).last["points"], truth["point"].output["points"]
    )


def test_a_crowd_of_streams_is_answered_rightly(endpoint: Endpoint, truth: dict[str, Asked]) -> None:
    crowd = [asked for name, asked in truth.items() if name not in SINGLE and name != BIG] * 2
    assert len(crowd) == NUM_STREAMS
    assert len({json.dumps(asked.output) for asked in crowd if asked.skill in ("point", "detect")}) == NUM_STREAMS // 4

    def stream(asked: Asked) -> Seen:
        return ask(endpoint.url, skill=asked.skill, stream=True, **asked.fields)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        results = list(pool.map(stream, crowd))
    for asked, seen in zip(crowd, results, strict=True):
        key = KEYS[asked.skill]
        assert same(seen.last[key], asked.output[key]), asked.skill
        if asked.skill in ("caption", "query"):
            assert seen.text == asked.output[key]
    assert len({seen.last["request_id"] for seen in results}) == NUM_STREAMS


# ---------------------------------------------------------------------- refusals


def wrong_type() -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("SKILL", [1], "INT32")
    tensor.set_data_from_numpy(np.array([1], dtype=np.int32))
    return tensor


def two_texts() -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("QUESTION", [2], "BYTES")
    tensor.set_data_from_numpy(np.array(["a", "b"], dtype=np.object_))
    return tensor


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no skill": ({"question": "Who are you?"}, "SKILL"),
    "no input at all": ({}, ""),
    "unknown skill": ({"skill": "sing"}, "SKILL.*'sing'.*query"),
    "skill that is no text": ({"skill": b"\xff\xfe"}, "SKILL.*UTF-8"),
    "unknown input": ({"skill": "query", "question": "Who?", "colour": "red"}, "COLOUR"),
    "no question": ({"skill": "query"}, "QUESTION.*required"),
    "no picture": ({"skill": "caption"}, "IMAGE"),
    "empty picture": ({"skill": "caption", "image": b""}, "IMAGE.*no data"),
    "no image file": ({"skill": "caption", "image": b"\x00\xff picture"}, "IMAGE.*not a picture"),
    "cut base64": ({"skill": "caption", "image": base64.b64encode(PICTURE)[:-3]}, "IMAGE.*base64"),
    "cut picture": ({"skill": "caption", "image": PICTURE[:4000]}, "IMAGE"),
    "20 MB of nothing": ({"skill": "caption", "image": b"\0" * BIG_BYTES}, "IMAGE"),
    "another skill's input": ({"skill": "caption", "image": PICTURE, "question": "Who?"}, "QUESTION.*caption"),
    "settings that are no JSON": ({"skill": "query", "question": "Who?", "settings": "{"}, "SETTINGS.*JSON"),
    "settings that are a list": ({"skill": "query", "question": "Who?", "settings": [1]}, "SETTINGS"),
    "absurd temperature": ({"skill": "query", "question": "Who?", "settings": {"temperature": 1e9}}, "temperature"),
    "absurd length": ({"skill": "query", "question": "Who?", "settings": {"max_tokens": -1}}, "max_tokens"),
    "unknown setting": ({"skill": "query", "question": "Who?", "settings": {"mood": 1}}, "mood"),
    "huge settings": ({"skill": "query", "question": "Who?", "settings": {"seed": 10**300}}, "seed|SETTINGS"),
    "bad references": ({"skill": "query", "question": "Who?", "spatial_refs": [[7]]}, "(?i)spatial_refs"),
    "unknown adapter": ({"skill": "query", "question": "Who?", "adapter": "nobody"}, "nobody"),
    "endless question": ({"skill": "query", "question": "why " * 100_000}, "maximum context length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_one_clean_error(endpoint: Endpoint, name: str) -> None:
    fields, pattern = REFUSED[name]
    for stream in (False, True) if name == "unknown adapter" else (False,):
        seen = ask(endpoint.url, stream=stream, **fields) if fields else ask(endpoint.url)
        assert seen.bodies == []
        assert_clean(seen.error, pattern)


@pytest.mark.parametrize(("tensor", "pattern"), [(wrong_type, "SKILL.*BYTES"), (two_texts, "QUESTION")])
def test_a_tensor_of_the_wrong_kind_is_one_clean_error(endpoint: Endpoint, tensor: Any, pattern: str) -> None:
    seen = ask(endpoint.url, tensor(), **({} if tensor is wrong_type else {"skill": "query"}))
    assert seen.bodies == []
    assert_clean(seen.error, pattern)


def assert_clean(error: str | None, pattern: str) -> None:
    assert error is not None
    assert re.search(pattern, error), error
    assert not re.search(r"Traceback|\.py\b|0x[0-9a-f]{6}", error), error
    assert len(error) < 1500


def test_an_unknown_model_is_not_found(endpoint: Endpoint) -> None:
    with open_stream(endpoint.url) as (client, arrived):
        client.async_stream_infer("sundream", tensors(skill="query", question="Who?"))
        _, error = arrived.get(timeout=60)
    assert "sundream" in error.message()


# ---------------------------------------------------------------------- many requests, few streams


def test_requests_of_one_stream_run_side_by_side(endpoint: Endpoint) -> None:
    seen, before = {"slow": Seen(), "quick": Seen()}, endpoint.num_left
    with open_stream(endpoint.url, leaves=True) as (client, arrived):

        def next_of(name: str) -> None:
            num_before = len(seen[name].bodies)
            while len(seen[name].bodies) == num_before:
                result, error = arrived.get(timeout=60)
                assert error is None
                note(seen[result.get_response().id], result)

        slow = tensors(skill="query", **long_query(END_ID, stream=True))
        client.async_stream_infer("moondream", slow, request_id="slow")
        next_of("slow")
        quick = tensors(skill="query", question="Who are you?", settings={"max_tokens": 2})
        client.async_stream_infer("moondream", quick, request_id="quick")
        next_of("quick")
        assert seen["quick"].finals == [True]
        next_of("slow")
        assert not any(seen["slow"].finals)
    assert eventually(lambda: endpoint.num_left == before + 1)  # or the next test would count it


# ---------------------------------------------------------------------- clients that leave


def test_a_killed_client_leaves_nothing_running(endpoint: Endpoint) -> None:
    before = endpoint.num_left
    command = [sys.executable, "-m", "tests.integrations.leaver", endpoint.url, str(NUM_LEAVERS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as leaver:
        assert leaver.stdout is not None
        assert leaver.stdout.readline() == b"running\n"
        leaver.kill()
    assert eventually(lambda: endpoint.num_left == before + NUM_LEAVERS), endpoint.log[-3000:]
    assert ask(endpoint.url, skill="query", question="Who are you?", settings={"max_tokens": 1}).finals == [True]


def test_a_client_that_cancels_ends_its_request(endpoint: Endpoint) -> None:
    before = endpoint.num_left
    with open_stream(endpoint.url, leaves=True) as (client, arrived):
        client.async_stream_infer("moondream", tensors(skill="query", **long_query(END_ID, stream=True)))
        assert arrived.get(timeout=60)[1] is None
    assert eventually(lambda: endpoint.num_left == before + 1)


# ---------------------------------------------------------------------- the way the document shows


def test_the_documents_own_client_works(endpoint: Endpoint, truth: dict[str, Asked]) -> None:
    """NumPy object arrays, a callback that raises on errors, `completed` to know the end."""
    client = grpcclient.InferenceServerClient(endpoint.url)

    def string_input(name: str, value: Any) -> grpcclient.InferInput:
        inp = grpcclient.InferInput(name, [1], "BYTES")
        inp.set_data_from_numpy(np.array([value], dtype=np.object_))
        return inp

    def bool_input(name: str, value: bool) -> grpcclient.InferInput:
        inp = grpcclient.InferInput(name, [1], "BOOL")
        inp.set_data_from_numpy(np.array([value], dtype=np.bool_))
        return inp

    def infer(inputs: list[grpcclient.InferInput]) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        done = threading.Event()

        def cb(result: Any, error: Any) -> None:
            if error:
                raise RuntimeError(error)
            data = json.loads(result.as_numpy("TEXT_OUTPUT")[0].decode("utf-8"))
            chunks.append(data)
            if data.get("completed", True):
                done.set()

        client.start_stream(callback=cb)
        client.async_stream_infer("moondream", inputs)
        assert done.wait(60)
        client.stop_stream()
        return chunks

    image, settings = string_input("IMAGE", PICTURE), string_input("SETTINGS", json.dumps(WORDY))
    question = string_input("QUESTION", "What is in this picture?")
    chunks = infer([string_input("SKILL", "query"), question, image, settings])
    assert chunks[0]["answer"] == truth["query"].output["answer"]
    short = string_input("LENGTH", "short")
    chunks = infer([string_input("SKILL", "caption"), short, image, settings, bool_input("STREAM", True)])
    assert all(chunk.keys() == {"chunk", "completed", "token_index"} for chunk in chunks[:-1])
    assert chunks[-1]["caption"] == "".join(chunk["chunk"] for chunk in chunks) == truth["caption"].output["caption"]
    bees = string_input("OBJECT", "bee")
    chunks = infer([string_input("SKILL", "detect"), bees, image])
    assert same(chunks[0]["objects"][:2], truth["detect"].output["objects"])
    chunks = infer([string_input("SKILL", "point"), bees, image])
    assert same(chunks[0]["points"][:3], truth["point"].output["points"])
    chunks = infer([string_input("SKILL", "segment"), bees, image])
    assert same(chunks[0]["segments"], json.loads(json.dumps(truth["outline"].output["segments"])))
    has_outline = chunks[0]["segments"][0]["svg_path"].startswith("M ")
    assert has_outline == (endpoint.kind == "triton"), "a coarse look sees none"
    client.close()


@pytest.mark.parametrize("load", [[], ["--concurrency=3", "--requests=6", "--skill=caption", "--length=short"]])
def test_the_projects_client_tries_and_measures(endpoint: Endpoint, load: list[str]) -> None:
    command = [sys.executable, "triton/client.py", "--url", endpoint.url, "--image", str(SCENE), "--object", "bee"]
    ran = subprocess.run([*command, *load], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    if load:
        assert "6 answered, 0 failed" in ran.stdout
        assert re.search(r"whole answer: p50 [\d.]+ ms, p95 [\d.]+ ms", ran.stdout)
    else:
        assert re.findall(r"^(\w+): ", ran.stdout, re.MULTILINE) == ["query", "caption", "point", "detect", "segment"]


def test_the_projects_client_says_when_something_failed(endpoint: Endpoint) -> None:
    command = [sys.executable, "triton/client.py", "--url", endpoint.url, "--image", str(SCENE), "--skill", "caption"]
    ran = subprocess.run([*command, "--settings", "{}}"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "caption: FAILED: SETTINGS: is not JSON" in ran.stdout


def test_over_http_triton_answers_at_generate(endpoint: Endpoint, truth: dict[str, Asked]) -> None:
    if endpoint.kind != "triton":
        pytest.skip("our own HTTP API is not Triton's")
    skill, fields = SINGLE["point"]
    body = {"SKILL": skill, "OBJECT": fields["object"], "IMAGE": base64.b64encode(PICTURE).decode()}
    url = f"http://127.0.0.1:{endpoint.http_port}/v2/models/moondream/generate"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as response:
        answer = json.loads(json.load(response)["TEXT_OUTPUT"])
    assert same(answer["points"], truth["point"].output["points"])


# ---------------------------------------------------------------------- beginning and end


@pytest.mark.exhaustive
def test_triton_ends_with_the_reason_when_a_setting_cannot_work(tmp_path: Path) -> None:
    install_triton()
    failing = launch_triton(tmp_path / "log", KESTREL_MAX_BATCH_SIZE="0")
    assert failing.process.wait(60) == 1
    assert "max_batch_size: must be an integer from 1 to 4096 (got 0)" in failing.log
    assert shared_memory_of(failing.process.pid) == []


def test_sigterm_under_load_loses_no_accepted_request(endpoint: Endpoint) -> None:
    """The last test: it ends the server that the others share."""
    outcomes: Counter[str] = Counter()
    began = threading.Semaphore(0)

    def client(number: int) -> None:
        seen = Seen()
        with open_stream(endpoint.url) as (client, arrived):
            request = long_query(END_ID, max_tokens=40, stream=True)
            client.async_stream_infer("moondream", tensors(skill="query", **request))
            while seen.error is None and not (seen.finals and seen.finals[-1]):
                result, error = arrived.get(timeout=60)
                if error is not None:
                    seen.error = str(error)
                else:
                    note(seen, result)
                    began.release()
        if seen.error is None:
            assert seen.last["metrics"]["output_tokens"] == 40
        outcomes["answered" if seen.error is None else "cut" if seen.bodies else "refused"] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    assert began.acquire(timeout=60)
    endpoint.terminate()
    began_s = time.monotonic()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    answered_s = time.monotonic() - began_s
    endpoint.stop()
    ended_s = time.monotonic() - began_s
    print(f"\n{endpoint.kind}: {dict(outcomes)} after {answered_s:.1f} s, ended after {ended_s:.1f} s")
    endpoint.require_clean_end()
    assert outcomes["cut"] == 0
    assert outcomes["answered"] + outcomes["refused"] == len(threads)
    assert outcomes["answered"] >= 1
