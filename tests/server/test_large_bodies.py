"""Large bodies of every shape: each list is counted before it is walked, and nobody else waits for a large body."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import linecache
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import httpx
import orjson
import pytest

from kestrel.engine import EngineResult
from kestrel.errors import RequestError
from kestrel.images import encoded
from kestrel.images.encoded import base64_start, decode_base64
from kestrel.server import json_body
from kestrel.server.config import ServerConfig
from kestrel.server.state import RequestInfo
from tests.exhaustive import sweep
from tests.server.conftest import RunningServer
from tests.server.sockets import JSON

MANY = 300_000
MAX_VALUES = ServerConfig().max_body_values
MAX_TURN = 5.0
"""What the event loop may compute in one turn, in `reference_s`. Lists that are walked as a whole take longer."""
MAX_CALL = 2.5
"""The same for one call of the parser on another thread: it holds the GIL, so that the event loop waits."""


def reference_s() -> float:
    """How long the parser takes for half a million numbers, on this machine and now: 9 ms at 2.5 GHz, while a turn of
    50 ms is what other clients may notice."""
    body = f"[{'17,' * 2**19}17]".encode()
    times_s: list[float] = []
    for _ in range(3):
        began_s = time.thread_time()
        orjson.loads(body)
        times_s.append(time.thread_time() - began_s)
    return sorted(times_s)[1]


def ids(how_many: int) -> str:
    return f"[{'17,' * (how_many - 1)}17]"


def asked(name: str, value: str) -> str:
    return f'{{"question": "Who?", "max_tokens": 1, "{name}": {value}}}'


def completed(prompt: str, **fields: Any) -> str:
    return f'{{"prompt": {prompt}, {json.dumps({"max_tokens": 1, **fields})[1:]}'


def parts(how_many: int) -> str:
    return "[" + ", ".join(['{"type": "text", "text": "a"}'] * how_many) + "]"


def said(content: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}]}}'


class Turns:
    """How long the loop's thread computed in its longest turn. Its own time: a busy machine does not count."""

    longest_s = 0.0

    async def watch(self) -> None:
        began_s = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now_s = time.thread_time()
            self.longest_s, began_s = max(self.longest_s, now_s - began_s), now_s


@contextmanager
def watched(server: RunningServer) -> Iterator[Turns]:
    """Without collections: they look at every object of the tests, while a server sets apart what stays."""
    turns = Turns()
    gc.disable()
    watching = asyncio.run_coroutine_threadsafe(turns.watch(), server.loop)
    try:
        yield turns
    finally:
        watching.cancel()
        gc.enable()


LISTS: dict[str, tuple[str, Callable[[], str], str, str]] = {
    "prompt": ("/v1/completions", lambda: completed(ids(MANY)), "prompt", "300000"),
    "prompts": ("/v1/completions", lambda: completed("[" + '"a",' * 80_000 + '"a"]'), "prompt", "80001"),
    "stop_token_ids": ("/v1/completions", lambda: completed('"a"', stop_token_ids=[1] * MANY), "stop_token_ids", "64"),
    "allowed_ids": ("/v1/query", lambda: asked("allowed_ids", ids(MANY)), "allowed_ids", "2048 ids"),
    "suppressed_ids": (
        "/v1/query",
        lambda: asked("settings", f'{{"suppressed_ids": {ids(MANY)}}}'),
        "suppressed_ids",
        "2048 ids",
    ),
    "spatial_refs": (
        "/v1/query",
        lambda: asked("spatial_refs", "[" + "[0.5,0.5]," * 30_000 + "[0.5,0.5]]"),
        "spatial_refs",
        "30001",
    ),
    "choices": (
        "/v1/query",
        lambda: asked("response_format", '{"type": "choice", "choices": [' + '"a",' * 80_000 + '"a"]}'),
        "response_format.choices",
        "80001",
    ),
    "parts": ("/v1/chat/completions", lambda: said(parts(9_000)), "messages[0].content", "9000"),
    "messages": (
        "/v1/chat/completions",
        lambda: '{"messages": [' + ", ".join(['{"role": "user", "content": "a"}'] * 9_000) + "]}",
        "messages",
        "9000",
    ),
    "tools": (
        "/v1/chat/completions",
        lambda: said('"a"').removesuffix("}") + ', "tools": [' + "{}," * 9_000 + "{}]}",
        "tools",
        "9001",
    ),
    "input": ("/v1/embeddings", lambda: f'{{"input": {ids(MANY)}}}', "input", "300000"),
    "input parts": ("/v1/embeddings", lambda: f'{{"input": {parts(9_000)}}}', "input", "9000"),
    "tokens": ("/detokenize", lambda: f'{{"tokens": {ids(MANY)}}}', "tokens", "300000"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_long_list_is_refused_by_its_name_and_count_without_holding_the_event_loop(
    server: RunningServer, client: httpx.Client, name: str
) -> None:
    path, body, field, count = LISTS[name]
    content = body().encode()
    with watched(server) as turns:
        response = client.post(path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert count in error["message"]
    assert turns.longest_s < MAX_TURN * reference_s()


@pytest.mark.parametrize(
    "values", ["[],", "[[[[[]]]]],", '"a",', '{"":0},', '["a"],'], ids=["lists", "nested", "texts", "objects", "pairs"]
)
def test_many_values_in_a_small_body_are_parsed_off_the_event_loop(
    server: RunningServer, client: httpx.Client, values: str
) -> None:
    body = asked("allowed_ids", f"[{values * ((json_body.LARGE_BODY_BYTES - 100) // len(values))}1]")
    assert len(body) < json_body.LARGE_BODY_BYTES
    with watched(server) as turns:
        response = client.post("/v1/query", content=body, headers=JSON)
    assert response.status_code == 400
    assert turns.longest_s < MAX_TURN * reference_s()


class Beginnings:
    """An observer that notes in which turn of the event loop each engine request begins."""

    def __init__(self) -> None:
        self.turn = 0
        self.turns: list[int] = []

    async def count(self, number: int) -> None:
        """Until so many have begun: the worker hardly gets the GIL from a loop that never rests."""
        while len(self.turns) < number:
            self.turn += 1
            await asyncio.sleep(0)

    def started(self, request: RequestInfo) -> None:
        self.turns.append(self.turn)

    def finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None: ...


@pytest.mark.parametrize("stream", [False, True])
def test_many_choices_begin_one_in_a_turn_of_the_event_loop(
    server: RunningServer, client: httpx.Client, stream: bool
) -> None:
    seen = Beginnings()
    server.state.observers.append(seen)
    counting = asyncio.run_coroutine_threadsafe(seen.count(8), server.loop)
    try:
        client.post("/v1/completions", content=completed('"bee"', n=8, stream=stream), headers=JSON).raise_for_status()
    finally:
        counting.cancel()
        server.state.observers.remove(seen)
    assert len(set(seen.turns)) == len(seen.turns) == 8


@pytest.mark.parametrize(
    "values",
    [
        "1," * 2**20,
        '"a",' * 350_000,
        "[]," * 70_000,
        '{"a":1},' * 40_000,
        '"[,:",' * 50_000,
        '"\\n\\n\\n",' * 80_000,
        "1," + " " * 5_000_000,
    ],
    ids=["numbers", "texts", "lists", "objects", "signs", "escapes", "blanks"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(client: httpx.Client, values: str) -> None:
    with patch.object(json_body, "parse_json", side_effect=AssertionError("it was parsed")):
        response = client.post("/v1/query", content=f'{{"a": [{values}1]}}'.ljust(2**18 + 1), headers=JSON)
    assert response.status_code == 400
    assert "max_body_values" in response.json()["error"]["message"]


LONG = "k" * 3_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/query", {"question": "Who?", LONG: 1}),
        ("/v1/query", {"question": "Who?", "settings": {LONG: 1}}),
        ("/v1/query", {"question": "Who?", "model": LONG}),
        ("/v1/query", {"question": "Who?", "response_format": {"type": "json_object", LONG: 1}}),
        ("/v1/query", {"question": "Who?", "image_url": {str(i): {LONG: i} for i in range(5)}}),
        ("/v1/query", {"question": [[[[["k" * 100] * 9] * 9] * 9] * 9]}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": LONG}),
    ],
)
def test_a_refusal_is_short_whatever_the_client_sent(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 2500


def test_a_key_twice_in_a_large_body_is_refused(client: httpx.Client) -> None:
    content = f'{{"image_url": "{LONG}", "image_url": "{LONG}"}}'
    error = client.post("/v1/query", content=content, headers=JSON).json()["error"]
    assert (error["param"], "twice" in error["message"]) == ("body", True)


# ---------------------------------------------------------------------- threads


@contextmanager
def busy_default_executor(server: RunningServer) -> Iterator[None]:
    """Every thread that asyncio lends to everybody waits."""
    end = threading.Event()

    async def occupy() -> None:
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, end.wait, 60)

    server.on_loop(occupy)
    try:
        yield
    finally:
        end.set()


def test_bodies_tokens_and_log_probabilities_wait_for_no_shared_threads(server: RunningServer) -> None:
    picture = {"question": "Who?", "image_url": "A" * 2**21}
    scored = {"prompt": "bee " * 100, "echo": True, "logprobs": 1, "max_tokens": 0}
    with busy_default_executor(server), httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.post("/v1/query", json=picture).status_code == 400
        assert client.post("/tokenize", json={"prompt": "bee"}).json()["count"] > 1
        assert client.post("/detokenize", json={"tokens": [300]}).status_code == 200
        assert client.post("/v1/completions", json=scored).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "bee " * 1500, "max_tokens": 1}).status_code == 200


# ---------------------------------------------------------------------- log-probabilities


def scored(how_many: int, length: int, top: int, **fields: Any) -> dict[str, Any]:
    prompts = [[(i + j) % 1000 + 100 for i in range(length)] for j in range(how_many)]
    return {"prompt": prompts, "echo": True, "logprobs": top, "max_tokens": 0, **fields}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", scored(48, 2000, 64), "logprobs"),
        ("/v1/completions", scored(48, 2, 64, max_tokens=2000), "logprobs"),
        ("/v1/completions", {"prompt": ["é" * 2000] * 48, "echo": True, "logprobs": 64, "max_tokens": 1}, "logprobs"),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Who?"}],
                "n": 128,
                "max_tokens": 1000,
                "logprobs": True,
                "top_logprobs": 64,
            },
            "top_logprobs",
        ),
    ],
)
def test_more_log_probabilities_than_the_limit_are_refused_before_anything_runs(
    server: RunningServer, client: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    num_started = len(server.watcher.started_ids)
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == field
    assert "max_logprobs" in error["message"]
    assert len(server.watcher.started_ids) == num_started


def test_one_prompt_of_full_length_may_have_the_most_log_probabilities(
    server: RunningServer, client: httpx.Client
) -> None:
    body = scored(1, server.engine.max_model_length - 1, 64)
    with watched(server) as turns:
        answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    tops = choice["logprobs"]["top_logprobs"]
    assert len(tops) == len(body["prompt"][0])
    assert all(len(top) >= 60 for top in tops[1:])
    assert turns.longest_s < MAX_TURN * reference_s()


@pytest.mark.parametrize("value", [[], {}, "", False, "0", 1.5, -1])
@pytest.mark.parametrize("wants", [True, False])
def test_top_logprobs_that_are_no_number_are_refused(client: httpx.Client, value: Any, wants: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}], "logprobs": wants, "top_logprobs": value}
    response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


# ---------------------------------------------------------------------- long texts


MOST = 2**20
LONG_TEXTS = {
    "ascii": ("x", 3_000_000),
    "two bytes": ("é", 1_500_000),
    "three and four bytes": ("日😀", 500_000),
    "colons": ("a:", 1_000_000),
    "quotation marks": ('"' + "y" * 200_000, 12),
    "backslashes": ("\\" + "y" * 200_000, 12),
    "backslashes and a quotation mark": ('\\\\"' + "y" * 200_000 + '\\"', 12),
    "a backslash at the end": ("z" * 2_500_000 + "\\", 1),
    "lines": ("y" * 70 + "\n", 40_000),
}


@pytest.mark.parametrize("ensure_ascii", [False, True])
@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_a_long_text_is_parsed_in_pieces_to_the_same(kind: str, ensure_ascii: bool) -> None:
    part, times = LONG_TEXTS[kind]
    text = part * times
    value = {"a": text, "b": ["short", text, {"c": text[::-1], text: 1}], "numbers": list(range(30_000)), "d": "e:f"}
    body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    parse, sizes = json_body.orjson.loads, []
    with patch.object(json_body.orjson, "loads", lambda part: (sizes.append(len(part)), parse(part))[1]):
        assert json_body.parse_in_pieces(body, MOST) == value
    assert max(sizes[1:]) < 2.5 * json_body.PIECE_BYTES, "longer ones hold the GIL"


def test_escapes_are_never_cut_wherever_they_stand() -> None:
    rest = "y" * json_body.PIECE_BYTES
    for start in range(json_body.PIECE_BYTES - 14, json_body.PIECE_BYTES + 2):
        value = ["x" * start + "\\😀\n😀" + rest]
        assert json_body.parse_in_pieces(json.dumps(value).encode(), MOST) == value
        assert json_body.parse_in_pieces(json.dumps(value, ensure_ascii=False).encode(), MOST) == value


@pytest.mark.exhaustive
def test_random_texts_of_escapes_in_small_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "PIECE_BYTES", 24)
    monkeypatch.setattr(json_body, "RUN_BYTES", 8)
    monkeypatch.setattr(json_body, "SEARCH_BYTES", 64)
    rng = random.Random(0)
    for _ in range(1_000):
        letters = ["\\"] * rng.randrange(60) + rng.choices('\\\\"\n\taué😀\u0000', k=rng.randrange(400))
        value = ["".join(letters), {"".join(rng.choices("\\u😀d", k=60)): "".join(letters[::-1])}]
        for ensure_ascii in (False, True):
            body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
            assert json_body.parse_in_pieces(body, MOST) == value


def test_a_long_text_beyond_ascii_is_refused_and_one_in_ascii_is_not() -> None:
    """One such character makes each of 30 million four bytes wide, which are copied in one call."""
    start = b'{"a":"' + b"x" * (json_body.MAX_WIDE_CHARACTERS + 1)
    for end in (b"\xc3\xa9", b"\\u00e9", b'\\"' + b"y" * 3000 + b"\xc3\xa9"):
        with pytest.raises(RequestError, match="not all ASCII"):
            json_body.parse_in_pieces(start + end + b'"}', MOST)
    assert json_body.parse_in_pieces(start + b'"}', MOST) == {"a": "x" * (json_body.MAX_WIDE_CHARACTERS + 1)}


# ---------------------------------------------------------------------- what one call costs


class LongestLine:
    """The longest time between two lines of the modules that read bodies: one call, or one operation, of C.

    Left out are the copies of a whole text: `bytes.join` lets go of the GIL, and a text grows in place only untraced.
    """

    FILES = (json_body.__file__, encoded.__file__)

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.source = ""
        self._place = ("", 0)
        self._began_s = 0.0

    def __call__(self, frame: FrameType, event: str, arg: object) -> LongestLine | None:
        took_s = time.thread_time() - self._began_s
        if took_s > self.longest_s and '"".join(' not in linecache.getline(*self._place):
            self.longest_s, self.source = took_s, linecache.getline(*self._place)
        if frame.f_code.co_filename not in self.FILES:
            return None
        self._place = (frame.f_code.co_filename, frame.f_lineno)
        self._began_s = time.thread_time()
        return self

    def of(self, function: Callable[[], object]) -> LongestLine:
        before = sys.gettrace()
        gc.disable()  # looking for garbage would count as the line that it comes upon
        self._began_s = time.thread_time()
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(before)
            gc.enable()
        return self


def assert_lines_are_short(function: Callable[[], object]) -> None:
    """In one of five runs: other programs may have taken the caches, or the memory's time, in those before."""
    for _ in range(5):
        longest = LongestLine().of(function)
        if longest.longest_s < MAX_CALL * reference_s():
            return
    raise AssertionError(longest.source)


ENTRIES = {
    "ids": "17,",
    "large numbers": "1234567890123456789,",
    "hard numbers": "9007199254740993.0000000000000000000001,",
    "tiny numbers": "2.2250738585072011e-308,",
    "numbers of many digits": f"0.{'1234567890' * 70},",
    "spaced numbers": "1,               ",
    "short texts": '"a",',
    "texts": f'"{"a" * 45}",',
    "texts of two bytes": f'"{"é" * 45}",',
    "texts of four bytes": f'"{"😀" * 45}",',
    "texts with escapes": '"a\\nb\\u00e9",',
    "texts of escapes": '"' + "\\u00e9" * 45 + '",',
    "paragraphs": f'"{"word " * 150}",',
    "lists": "[],",
    "pairs": "[0.5,0.5],",
    "nested lists": "[[[[[]]]]],",
    "deep lists": f"{'[' * 500}{']' * 500},",
    "objects": "{},",
    "parts": '{"type":"text","text":"a"},',
    "deep objects": '{"a":' * 300 + "1" + "}" * 300 + ",",
}


def full_body(entry: str) -> bytes:
    """As many entries as a body may have."""
    weight = json_body.cost_of(entry.encode())
    return f'{{"a":[{entry * int(MAX_VALUES / weight * 0.99)}1]}}'.encode()


def many_keys(num_characters: int) -> bytes:
    entry = f'"{"k" * num_characters}":1,'
    weight = json_body.cost_of(entry.encode())
    keys = (f'"{number:0{num_characters}d}":1' for number in range(int(MAX_VALUES / weight * 0.99)))
    return f"{{{','.join(keys)}}}".encode()


FULL_BODIES: dict[str, Callable[[], bytes]] = {
    **{name: lambda entry=entry: full_body(entry) for name, entry in ENTRIES.items()},
    "keys": lambda: many_keys(8),
    "long keys": lambda: many_keys(140),
}
TEXT_BODIES = {
    "a text": lambda: b'{"a":"' + b"x" * 30_000_000 + b'"}',
    "escapes": lambda: b'{"a":"' + b"\\n" * 1_000_000 + b'"}',
    "backslashes": lambda: b'{"a":"x' + b"\\\\" * 5_000_000 + b'y"}',
    "hexadecimal escapes": lambda: b'{"a":"' + b"\\ud83d\\ude00" * 500_000 + b'"}',
    "beyond ASCII": lambda: b'{"a":"' + b"x" * 4_000_000 + "😀".encode() + b'"}',
    "escaped quotation marks": lambda: b'{"a":"' + (b'\\"' + b"y" * 6000) * 4000 + b'"}',
}


def parsed(body: bytes) -> object:
    return json_body.parse_in_pieces(body, MAX_VALUES)


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """They look at every object of the tests; a server sets those that stay apart."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("name", FULL_BODIES)
def test_no_call_of_the_parser_holds_the_gil_for_long(name: str) -> None:
    body, parse, longest_s = FULL_BODIES[name](), json_body.orjson.loads, 0.0

    def timed(part: bytes) -> object:
        nonlocal longest_s
        began_s = time.thread_time()
        value = parse(part)
        longest_s = max(longest_s, time.thread_time() - began_s)
        return value

    def is_quick() -> bool:
        nonlocal longest_s
        longest_s = 0.0
        with patch.object(json_body.orjson, "loads", timed):
            parsed(body)
        return longest_s < MAX_CALL * reference_s()

    assert any(is_quick() for _ in range(5)), longest_s


@pytest.mark.usefixtures("_no_collections")
@sweep("name", TEXT_BODIES, always=[*TEXT_BODIES][:2])
def test_no_operation_on_a_long_text_holds_the_gil_for_long(name: str) -> None:
    body = TEXT_BODIES[name]()
    assert_lines_are_short(lambda: parsed(body))


@pytest.mark.parametrize("name", ENTRIES)
def test_more_than_that_is_refused(name: str) -> None:
    entry = ENTRIES[name]
    body = full_body(entry).replace(b"[", b"[" + entry.encode() * (body_entries(entry) // 20), 1)
    with pytest.raises(RequestError, match="max_body_values"):
        parsed(body)


def body_entries(entry: str) -> int:
    return full_body(entry).count(entry.encode())


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("line", [f"{'A' * 4096}", f"{'A' * 76}\n"], ids=["one line", "lines"])
def test_no_call_that_decodes_a_picture_holds_the_gil_for_long(head: str, line: str) -> None:
    text = head + line * (30_000_000 // len(line))
    assert_lines_are_short(lambda: decode_base64(text, "image", base64_start(text, "image")))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: b'{"a":"' + b"x" * 2_000_000, "is not JSON"),
        (lambda: b'{"a":"' + b"x" * 2_000_000 + b"\x01" + b'"}', "is not JSON"),
        (lambda: b'{"a":"' + b"x" * 2_000_000 + b"\xff" + b'"}', "is not JSON"),
        (lambda: b'{"a":"' + b"x" * 2_000_000 + b'\\q"}', "is not JSON"),
        (lambda: b'{"a":' + b" " * 2_000_000 + b'"b" "c"}', "is not JSON"),
        (lambda: b'{"a":[' + b",".join([b'"' + b"x" * 900 + b'"'] * 20_000) + b"]}", "max_body_values"),
        (lambda: b'{"a":1,"' + b"x" * 2_000_000 + b'":2,"a":3}', "the key 'a' is given twice"),
        (lambda: b'{"' + b"x" * 2_000_000 + b'":2,"' + b"x" * 2_000_000 + b'":3}', "gives a key twice"),
    ],
)
def test_long_texts_hide_no_mistake(body: Callable[[], bytes], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        json_body.parse_in_pieces(body(), MOST)


@pytest.mark.parametrize(
    "body",
    [
        lambda: b'{"a":"' + b"x" * 30_000_000,
        lambda: b" " * 30_000_000,
        lambda: b'{"a":' + b" " * 30_000_000 + b"1}",
        lambda: b" " * 30_000_000 + b'{"a":1}',
        lambda: b'{"a":"' + b"\x80" * 30_000_000 + b'"}',
        lambda: b'{"a":"' + b"x" * 10_000_000 + b'","b":[' + b"1," * 900_000 + b"1]}",
    ],
    ids=["no end", "blanks", "blanks inside", "blanks before", "no character", "numbers"],
)
def test_no_shape_of_a_long_body_takes_long(body: Callable[[], bytes]) -> None:
    made, began_s = body(), time.thread_time()
    with contextlib.suppress(RequestError):
        json_body.parse_in_pieces(made, MOST)
    assert time.thread_time() - began_s < 2.0, "most take 0.1 s; what is looked through again and again took minutes"
