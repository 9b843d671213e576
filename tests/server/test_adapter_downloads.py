"""Adapters from a web server, over HTTP: slow hosts delay nobody else, and the disk is not filled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources.remote import UrlTemplateSource
from kestrel.server.config import ServerConfig
from tests.adapters.adapter_hosts import Host, answer, host, slow
from tests.engine.conftest import GOLDENS
from tests.engine.random_adapters import write_adapters
from tests.server.conftest import RunningServer, runtime_config, start_server

T = TypeVar("T")
NUM_SLOW = 8
NUM_KEPT = NUM_SLOW + 2
NUM_ASKED = 14
ANSWERED_S = 20.0
"""Far more than an answer takes, and less than a silent host is waited for."""


@dataclass
class Downloads:
    server: RunningServer
    host: Host
    cache: Path
    content: bytes
    may_end: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def query(self, adapter: str, timeout_s: float = 60.0) -> httpx.Response:
        asked = {"question": "Is it?", "adapter": adapter, "settings": {"temperature": 0.0, "max_tokens": 2}}
        return httpx.post(f"{self.server.url}/v1/query", json=asked, timeout=timeout_s)

    def names(self) -> int:
        return len(list(self.cache.glob("*/*.safetensors")))

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Downloads]:
    folder = tmp_path_factory.mktemp("downloads")
    write_adapters(folder, "md2", 1)
    content = (folder / "a0.safetensors").read_bytes()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    hosts, may_end, cache = host(), asyncio.Event(), folder / "cache"
    played = on_loop(hosts.__aenter__())
    template = played.url + "/{id}"
    for name in ("early", *(f"n{number}" for number in range(NUM_ASKED))):
        played.answers[f"/{name}"] = answer(200, content)
    for number in range(NUM_SLOW):
        played.answers[f"/slow{number}"] = slow(content, may_end)
    on_loop(UrlTemplateSource(template, cache).fetch(AdapterId("early")))  # an earlier program brought it
    (cache / ".download-left0ver").write_bytes(bytes(1000))
    config = runtime_config(
        model_path=GOLDENS / "md2",
        kv_cache_pages=300,
        adapter_url_template=template,
        adapter_cache_dir=cache,
        adapter_cache_bytes=int(NUM_KEPT * (len(content) + 1000)),
    )
    for server in start_server(ServerConfig(port=0), config):
        yield Downloads(server, played, cache, content, may_end, loop)
        loop.call_soon_threadsafe(may_end.set)
    on_loop(hosts.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def test_partial_downloads_of_dead_programs_are_swept_at_the_start(downloads: Downloads) -> None:
    assert list(downloads.cache.glob(".download-*")) == []


def test_an_adapter_on_disk_does_not_wait_behind_slow_downloads(downloads: Downloads) -> None:
    with ThreadPoolExecutor(NUM_SLOW) as pool:
        slow_ones = [pool.submit(downloads.query, f"slow{number}") for number in range(NUM_SLOW)]
        while downloads.host.open_connections < 4:
            assert not any(future.done() for future in slow_ones)
        try:
            assert downloads.query("early", ANSWERED_S).status_code == 200
            assert not any(future.done() for future in slow_ones)
        finally:
            downloads.loop.call_soon_threadsafe(downloads.may_end.set)
        assert [future.result().status_code for future in slow_ones] == [200] * NUM_SLOW


def test_downloads_stay_within_their_bound_and_all_are_answered(downloads: Downloads) -> None:
    for number in range(NUM_ASKED):
        assert downloads.query(f"n{number}").status_code == 200
    assert downloads.names() <= NUM_KEPT
    assert downloads.num_bytes() <= NUM_KEPT * (len(downloads.content) + 1000)
    assert downloads.query(f"n{NUM_ASKED - 1}").status_code == 200
    assert downloads.host.count(f"/n{NUM_ASKED - 1}") == 1
