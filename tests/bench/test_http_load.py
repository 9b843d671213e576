"""The load generator: its client on real sockets, its rates and percentiles by hand, its page as a browser reads it."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.bench.http_load.client import Connection, Outcome, Target, outcome_of
from kestrel.bench.http_load.command import main, read_run
from kestrel.bench.http_load.page import Run, render, round_ticks
from kestrel.bench.http_load.ramp import (
    ConstantConcurrency,
    ConstantRate,
    Ramp,
    Sender,
    ServerUnusable,
    StageRun,
    Thresholds,
    percentile,
    stage_report,
    warm_up,
)
from kestrel.errors import ConfigError

RESULT = {
    "answer": "3",
    "metrics": {"input_tokens": 740, "output_tokens": 4},
    "ttft_s": 0.02,
    "processing_latency_s": 0.03,
    "decode_latency_s": 0.01,
}
LOOSE = Thresholds(latency_ms=1e6, ttft_ms=1e6, error_rate=1.0)


def whole(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
    return head + b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


class Host:
    """Answers each request on a socket with what `answer` gives for its body, after a while."""

    def __init__(self, answer: Callable[[bytes], bytes], delay_s: float = 0.0) -> None:
        self.answer = answer
        self.delay_s = delay_s
        self.bodies: list[bytes] = []
        self.num_connections = self.num_now = self.most_at_once = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                body = await reader.readexactly(int(length[1]))
                self.bodies.append(body)
                self.num_now += 1
                self.most_at_once = max(self.most_at_once, self.num_now)
                await asyncio.sleep(self.delay_s)
                self.num_now -= 1
                answer = self.answer(body)
                writer.write(answer)
                if b"connection: close" in answer or not answer:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def hosted(host: Host) -> AsyncIterator[Host]:
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/query"
    yield host
    server.close()


async def test_the_client_reads_whole_and_chunked_bodies_on_one_connection() -> None:
    answers = iter([whole(b'{"a": 1}'), chunked(b"data: 1\n\n", b"data: 2\n\n"), whole(b"")])
    async with hosted(Host(lambda body: next(answers))) as host:
        connection = Connection(Target.of(host.url))
        exchanges = [await connection.post(b"x" * n) for n in (1, 100_000, 0)]
        connection.close()
    assert [e.body for e in exchanges] == [b'{"a": 1}', b"data: 1\n\ndata: 2\n\n", b""]
    assert [e.is_stream for e in exchanges] == [False, True, False]
    assert [len(body) for body in host.bodies] == [1, 100_000, 0]
    assert host.num_connections == 1


async def test_a_closed_connection_is_opened_anew() -> None:
    """Closed as announced after the first answer, and without a word before the third."""
    answers = iter([whole(b"1", extra="connection: close\r\n"), whole(b"2"), b"", whole(b"3")])
    async with hosted(Host(lambda body: next(answers))) as host:
        connection = Connection(Target.of(host.url))
        assert [(await connection.post(b"{}")).body for _ in range(3)] == [b"1", b"2", b"3"]
        connection.close()
    assert host.num_connections == 3


async def test_time_to_the_first_event_leaves_out_comments() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        last = json.dumps({"completed": True, **RESULT}).encode()
        ping, first, rest = b"8\r\n: ping\n\n\r\n", b"a\r\ndata: {}\n\n\r\n", b"data: " + last + b"\n\n"
        writer.write(chunked().removesuffix(b"0\r\n\r\n") + ping)
        await asyncio.sleep(0.1)
        writer.write(first + f"{len(rest):x}\r\n".encode() + rest + b"\r\n0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection(Target.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"))
    outcome = outcome_of(await connection.post(b""))
    connection.close()
    server.close()
    assert outcome.ok
    assert outcome.ttft_s is not None
    assert outcome.ttft_s >= 0.1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (whole(b'{"error": {"code": "overloaded"}}', "503 Service Unavailable"), "503 overloaded"),
        (whole(b"<html>", "502 Bad Gateway"), "502"),
        (whole(b"<html>"), "no whole answer"),
        (chunked(b'data: {"chunk": "a", "completed": false}\n\n'), "no whole answer"),
        (chunked(b'data: {"error": {"code": "engine_stopped"}}\n\n'), "stream: engine_stopped"),
        (b"", "IncompleteReadError"),
        (b"nonsense\r\n\r\n", "ValueError"),
    ],
)
async def test_every_way_to_have_no_answer_is_an_error_with_a_name(answer: bytes, error: str) -> None:
    async with hosted(Host(lambda body: answer)) as host:
        sender = Sender(Target.of(host.url), [b"{}"], timeout_s=5)
        outcome = await sender.send()
        assert outcome.error == error
        with pytest.raises(ServerUnusable, match="warm-up"):
            await warm_up(sender, 1)
        sender.close()


async def test_an_answer_that_never_comes_is_an_error_too() -> None:
    async with hosted(Host(lambda body: whole(b"{}"), delay_s=5)) as host:
        outcome = await Sender(Target.of(host.url), [b"{}"], timeout_s=0.1).send()
    assert outcome.error == "no answer in 0.1 s"


async def test_a_stage_keeps_its_number_of_clients_busy_and_uses_the_bodies_in_turn() -> None:
    async with hosted(Host(lambda body: whole(json.dumps(RESULT).encode()), delay_s=0.05)) as host:
        sender = Sender(Target.of(host.url), [b"1", b"2", b"3"], timeout_s=5)
        run = await ConstantConcurrency(4).run(sender, 0.6, lambda outcome: None)
        sender.close()
    report = stage_report(ConstantConcurrency(4), run, LOOSE)
    assert host.most_at_once == host.num_connections == 4
    assert host.bodies[:6] == [b"1", b"2", b"3"] * 2
    assert report["requests_success"] == report["requests_total"] == len(host.bodies)
    assert 10 < report["throughput_rps"] <= 80
    assert report["latency"]["p50"] >= 0.05


async def test_a_rate_is_kept_however_slow_the_answers_and_what_finds_no_client_counts_as_an_error() -> None:
    async with hosted(Host(lambda body: whole(json.dumps(RESULT).encode()), delay_s=0.25)) as host:
        sender = Sender(Target.of(host.url), [b"{}"], timeout_s=5)
        run = await ConstantRate(20, concurrency_limit=2).run(sender, 0.5, lambda outcome: None)
        sender.close()
    report = stage_report(ConstantRate(20, 2), run, LOOSE)
    assert host.most_at_once == 2
    assert report["requests_total"] == 10
    assert report["requests_success"] == len(host.bodies) < 10
    assert report["errors"] == {"not sent: no free client": 10 - len(host.bodies)}
    assert report["target_rps"] == 20


def answered(started_s: float, ended_s: float, **more: Any) -> Outcome:
    return Outcome(started_s, ended_s, input_tokens=10, output_tokens=4, **more)


def test_rates_count_what_lies_in_the_window() -> None:
    """Two answered inside 10 s, one half outside: 2.5 requests."""
    run = StageRun(100.0, 10.0, [answered(100, 102), answered(103, 107), answered(108, 112)])
    report = stage_report(ConstantConcurrency(1), run, LOOSE)
    assert report["throughput_rps"] == pytest.approx(0.25)
    assert report["tokens"]["output_per_s"] == pytest.approx(1.0)
    assert report["tokens"]["input_per_s"] == pytest.approx(2.5)
    assert report["tokens"]["output"] == 12
    assert report["latency"]["p50"] == 4


def test_overload_is_said_in_words_for_each_threshold() -> None:
    outcomes = [answered(0, 2.0, ttft_s=1.0, processing_s=1.5, decode_s=0.5)] * 3 + [Outcome(0, 1, "503 overloaded")]
    limits = Thresholds(latency_ms=1000, ttft_ms=500, error_rate=0.1)
    report = stage_report(ConstantConcurrency(4), StageRun(0, 5, outcomes), limits)
    assert report["overload_reasons"] == [
        "error rate 25.0% > 10.0%",
        "p95 latency 2000 ms > 1000 ms",
        "p95 TTFT 1000 ms > 500 ms",
    ]
    assert report["overloaded"] is True
    assert report["errors"] == {"503 overloaded": 1}
    at_limit = Thresholds(latency_ms=2000, ttft_ms=1000, error_rate=0.25)
    assert stage_report(ConstantConcurrency(4), StageRun(0, 5, outcomes), at_limit)["overload_reasons"] == []


def test_a_stage_without_answers_has_no_percentiles() -> None:
    report = stage_report(ConstantConcurrency(1), StageRun(0, 5, []), LOOSE)
    assert report["latency"] == dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    assert (report["error_rate"], report["throughput_rps"]) == (0.0, 0.0)


def test_percentiles_are_numpys() -> None:
    values = sorted(np.random.default_rng(1).exponential(size=37).tolist())
    for percent in (0, 1, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_ramp_has_its_first_and_no_stage_beyond_its_last() -> None:
    assert [s.concurrency_limit for s in Ramp(1, 4, 10).stages()] == [1, 5, 9]
    assert [s.target_rps for s in Ramp(0.5, 0.5, 1.5, by_rate=True).stages()] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("top", "last"), [(0.0, 1.0), (7.0, 8.0), (1000.0, 1000.0), (0.013, 0.015), (23_456.0, 25_000.0)]
)
def test_ticks_are_round_and_reach_the_top(top: float, last: float) -> None:
    ticks = round_ticks(0.0, top)
    assert ticks[-1] == pytest.approx(last)
    assert 2 <= len(ticks) <= 8


# ---------------------------------------------------------------------- the page


def run_data(**changes: Any) -> dict[str, Any]:
    outcomes = [answered(i, i + 1.5, ttft_s=0.2, processing_s=1.2, decode_s=1.0) for i in range(8)]
    limits = Thresholds(latency_ms=1400, ttft_ms=2500, error_rate=0.1)
    stages = [stage_report(ConstantConcurrency(n), StageRun(0, 10, outcomes), limits) for n in (1, 2, 3)]
    return {
        "url": "http://server/v1/query",
        "prompt": "What?",
        "images": ["a.png"],
        "stage_duration_s": 10,
        "start_concurrency": 1,
        "concurrency_step": 1,
        "max_concurrency": 3,
        "latency_threshold_ms": 1400,
        "ttft_threshold_ms": 2500,
        "error_threshold": 0.1,
        "results": stages,
        **changes,
    }


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_nobody_for_anything() -> None:
    page = render([Run("one", run_data()), Run("two", run_data())])
    tags = Tags(page)
    assert tags.open == []
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "use", "image", "a"}
    assert not any({"src", "href", "style", "onload"} & attributes.keys() for _, attributes in tags.seen)
    assert "url(" not in page
    assert "@import" not in page
    charts = re.findall(r"<svg viewBox=\"0 0 \d{3}.*?</svg>", page, re.DOTALL)
    assert len(charts) == 6
    for chart in charts:
        ElementTree.fromstring(chart)


def test_every_stage_of_every_run_is_in_the_page() -> None:
    page = render([Run("one", run_data()), Run("two", run_data())])
    assert page.count('<tr class="overloaded">') == 6
    assert page.count("1,500 / 1,500") == 6 + 2
    assert page.count("p95 latency 1500 ms &gt; 1400 ms") == 6 + 2


def test_names_from_files_are_text_in_the_page() -> None:
    page = render([Run("<script>alert(1)</script>", run_data(prompt='"><b>x</b>', url="<i>"))])
    assert "<script" not in page
    assert "<b>x" not in page
    assert "&lt;script&gt;" in page


def test_runs_with_missing_figures_still_have_a_page() -> None:
    """Files of other programs may lack what is not known to them."""
    bare = {"results": [{"target_rps": None, "throughput_rps": 2.0, "concurrency_limit": 4, "error_rate": 0.0}]}
    assert "2.00" in render([Run("bare", bare)])
    assert "<h1>" in render([Run("empty", {"results": []})])


def test_a_page_of_earlier_runs_needs_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("bs4", "bs8"):
        (tmp_path / f"{name}.json").write_text(json.dumps(run_data()))
    page = tmp_path / "all.html"
    assert main(["--report", str(page), str(tmp_path / "bs4.json"), str(tmp_path / "bs8.json")]) == 0
    assert {"bs4", "bs8"} <= set(re.findall(r"</span>(\w+)", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("text", ["no json", "[]", '{"stages": []}'])
def test_a_file_that_is_no_run_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.json"):
        read_run(tmp_path / "odd.json")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--url", "ftp://x"], "--url"),
        (["--url", "http://127.0.0.1:99999/"], "--url"),
        (["--url", "http://127.0.0.1:9/v1/query", "--image", "nowhere.png"], "nowhere.png"),
        (["--url", "http://127.0.0.1:9/v1/query", "--start-concurrency", "9", "--max-concurrency", "3"], "max-conc"),
        (["--url", "http://127.0.0.1:9/v1/query", "--start-rps", "9"], "--max-rps"),
        (["--url", "http://127.0.0.1:9/v1/query", "--max-rps", "9"], "--start-rps"),
        (["--url", "http://127.0.0.1:9/v1/query"], "ConnectionRefusedError"),
    ],
)
def test_a_slip_in_the_flags_is_an_error_that_names_it(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--report", "x.html"], ["--url", "http://a/", "--stage-duration", "0"]])
def test_flags_that_make_no_sense_are_usage_errors(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
