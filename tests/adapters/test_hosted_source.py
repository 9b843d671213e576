"""Fine-tunes of the hosted service: downloaded once, kept with a checksum, shared by all who wait."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import remote
from kestrel.adapters.sources.remote import HostedSource
from kestrel.errors import (
    AdapterGone,
    AdapterNotFound,
    AdapterSourceError,
    ConfigError,
    EngineStopped,
)
from tests.adapters.adapter_hosts import answer, presigned, slow
from tests.adapters.hosted_service import API_PATH, CONTENT, FILE_PATH, ID, KEY, SIGNATURE, Service, cut_short, failure

WAIT_S = 30.0
"""For what comes within a moment."""


async def test_the_key_goes_to_the_service_and_never_to_the_host_of_the_file(service: Service) -> None:
    copy = await service.source().fetch(ID)
    assert copy.path.read_bytes() == CONTENT
    assert copy.digest == hashlib.sha256(CONTENT).hexdigest()
    assert [request["x-moondream-auth"] for request in service.api.requests] == [KEY]
    (request,) = service.files.requests
    assert KEY not in json.dumps(request)
    assert not {"x-moondream-auth", "authorization", "cookie"} & request.keys()


async def test_neither_key_nor_url_is_logged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await service.source().fetch(ID)
    assert caplog.records
    assert KEY not in caplog.text
    assert SIGNATURE not in caplog.text


async def test_first_requests_at_the_same_time_download_once(service: Service) -> None:
    source = service.source()
    copies = await asyncio.gather(*(source.fetch(ID) for _ in range(64)))
    assert len({copy.path for copy in copies}) == 1
    assert (service.api.count(API_PATH), service.files.count(FILE_PATH)) == (1, 1)


async def test_another_process_finds_the_file_without_the_network(service: Service) -> None:
    first = await service.source().fetch(ID)
    second = await service.source().fetch(ID)
    assert (first.path, first.digest) == (second.path, second.digest)
    assert len(service.api.requests) == 1
    assert [listing.name for listing in await service.source().list()] == [str(ID)]


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "removed", "no checksum", "a foolish checksum"])
async def test_a_damaged_cache_is_healed(service: Service, damage: str) -> None:
    path = (await service.source().fetch(ID)).path
    checksum = path.parent / "checksum.json"
    if damage == "a flipped bit":
        path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    elif damage == "cut short":
        path.write_bytes(CONTENT[:-1])
    elif damage == "removed":
        path.unlink()
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_text(json.dumps({**json.loads(checksum.read_text()), "sha256": "../../etc/passwd"}))
    copy = await service.source().fetch(ID)
    assert copy.path.read_bytes() == CONTENT
    assert service.files.count(FILE_PATH) == 2


async def test_a_file_damaged_while_the_program_runs_is_noticed(service: Service) -> None:
    source = service.source()
    path = (await source.fetch(ID)).path
    path.write_bytes(b"x" * len(CONTENT))
    assert (await source.fetch(ID)).path.read_bytes() == CONTENT


async def test_no_part_of_an_id_is_part_of_a_path(service: Service) -> None:
    copy = await service.source().fetch(ID)
    assert ID.name not in str(copy.path)
    assert "1000" not in str(copy.path.relative_to(service.cache))


async def test_a_source_killed_in_the_middle_fails_those_who_waited_and_nobody_else(service: Service) -> None:
    def die(writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    async def half_then_death(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, CONTENT)[:-100])
        await writer.drain()
        await asyncio.sleep(0.05)
        die(writer)

    other = AdapterId("another", "1")
    service.api.answers["/v1/tuning/finetunes/another/checkpoints/1/download"] = presigned(service.files.url + "/ok")
    service.files.answers["/ok"] = answer(200, CONTENT)
    service.files.answers[FILE_PATH] = half_then_death
    source = service.source()
    results = await asyncio.gather(*(source.fetch(ID) for _ in range(5)), source.fetch(other), return_exceptions=True)
    assert [type(result) for result in results[:5]] == [AdapterSourceError] * 5
    assert not isinstance(results[5], BaseException)
    assert service.files.count(FILE_PATH) == 1


async def test_a_download_ends_when_the_last_caller_has_gone(service: Service) -> None:
    never = asyncio.Event()
    service.files.answers[FILE_PATH] = slow(CONTENT, never)
    source = service.source()
    tasks = [asyncio.create_task(source.fetch(ID)) for _ in range(2)]
    async with asyncio.timeout(WAIT_S):
        while not service.left_overs() or not service.files.open_connections:
            await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.05)
    assert len(service.left_overs()) == 1
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0.05)
    assert service.left_overs() == []
    service.files.answers[FILE_PATH] = answer(200, CONTENT)
    assert (await source.fetch(ID)).path.read_bytes() == CONTENT
    never.set()


async def test_closing_ends_downloads(service: Service) -> None:
    never = asyncio.Event()
    service.files.answers[FILE_PATH] = slow(CONTENT, never)
    source = service.source()
    task = asyncio.create_task(source.fetch(ID))
    async with asyncio.timeout(WAIT_S):
        while not service.files.open_connections:
            await asyncio.sleep(0.01)
    await source.close()
    with pytest.raises(EngineStopped):
        await task
    assert service.left_overs() == []
    never.set()


async def test_an_unknown_id_is_asked_for_again_only_after_a_while(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.api.answers[API_PATH] = answer(410)
    source = service.source()
    for _ in range(3):
        assert type(await failure(source)) is AdapterGone
    assert len(service.api.requests) == 1
    monkeypatch.setattr(remote, "UNKNOWN_FOR_S", 0.0)
    source = service.source()
    await failure(source)
    service.api.answers[API_PATH] = presigned(service.files.url + FILE_PATH)
    assert (await source.fetch(ID)).path.read_bytes() == CONTENT


async def test_no_file_or_socket_stays_open(service: Service) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("counts handles in /proc")
    source = service.source(read_timeout_s=0.1)
    await source.fetch(ID)
    before = num_open()
    for round_number in range(8):
        service.files.answers[FILE_PATH] = (cut_short(True), answer(500), slow(CONTENT, asyncio.Event()))[
            round_number % 3
        ]
        (path,) = service.cache.glob("*/*.safetensors")
        path.write_bytes(b"damaged")
        await failure(source)
        service.files.answers[FILE_PATH] = answer(200, CONTENT)
        await source.fetch(ID)
    await asyncio.sleep(0.05)
    assert num_open() <= before + service.files.open_connections


async def test_a_plain_name_is_not_asked_for_at_the_service(service: Service) -> None:
    error = await failure(service.source(), AdapterId("cats"))
    assert type(error) is AdapterNotFound
    assert service.api.requests == []


@pytest.mark.parametrize("key", ["", "a b", "kéy", "key\r\nX-Evil: 1"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="MOONDREAM_API_KEY") as caught:
        HostedSource(key, tmp_path)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("base", ["http://api.example", "api.example", "ftp://x", "https://a:b@c"])
def test_the_service_is_asked_over_https_only(tmp_path: Path, base: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        HostedSource(KEY, tmp_path, base_url=base)
