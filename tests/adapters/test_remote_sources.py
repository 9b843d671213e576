"""Downloaded adapters: whole or not at all, once, with typed errors, and without a word about keys and URLs."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import DownloadLimits, HostedSource, UrlTemplateSource, remote
from kestrel.adapters.sources.source import AdapterSource
from kestrel.errors import (
    AdapterGone,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceDenied,
    AdapterSourceError,
    AdapterSourceTimeout,
    ConfigError,
    EngineStopped,
    KestrelError,
)
from tests.adapters.adapter_files import HOSTED
from tests.adapters.adapter_hosts import Answer, Host, answer, host, presigned, slow

CONTENT = HOSTED.read_bytes()
KEY = "key-0123456789"
SIGNATURE = "signature-9876543210"
ID = AdapterId("01J5Z3NDEKTSV4RRFFQ69G5FAV", "1000")
API_PATH = "/v1/tuning/finetunes/01J5Z3NDEKTSV4RRFFQ69G5FAV/checkpoints/1000/download"
FILE_PATH = f"/bucket/file.bin?X-Signature={SIGNATURE}"


@dataclass
class Service:
    api: Host
    files: Host
    cache: Path

    def source(self, **limits: float) -> HostedSource:
        return HostedSource(KEY, self.cache, base_url=self.api.url, limits=DownloadLimits(**limits))  # type: ignore[arg-type]

    def left_overs(self) -> list[str]:
        return [path.name for path in self.cache.glob(".download-*")]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with host() as api, host() as files:
        api.answers[API_PATH] = presigned(files.url + FILE_PATH)
        files.answers[FILE_PATH] = answer(200, CONTENT)
        yield Service(api, files, tmp_path / "cache")


async def failure(source: AdapterSource, adapter_id: AdapterId = ID) -> KestrelError:
    """The error of one request; every one of them names the adapter and keeps secrets."""
    with pytest.raises(KestrelError) as caught:
        await source.fetch(adapter_id)
    message = str(caught.value)
    assert f"'{adapter_id}'" in message
    for secret in (KEY, SIGNATURE, "127.0.0.1", "bucket", "/tmp"):
        assert secret not in message
    return caught.value


# ---------------------------------------------------------------------- what arrives


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


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, AdapterSourceDenied, "MOONDREAM_API_KEY"),
        (403, AdapterSourceDenied, "MOONDREAM_API_KEY"),
        (404, AdapterNotFound, "does not know it"),
        (410, AdapterGone, "removed"),
        (429, AdapterSourceBusy, "retry later"),
        (500, AdapterSourceError, "status 500"),
        (502, AdapterSourceError, "status 502"),
        (503, AdapterSourceBusy, "retry later"),
        (204, AdapterSourceError, "status 204"),
    ],
)
@pytest.mark.parametrize("place", ["api", "files"])
async def test_each_status_has_its_error(
    service: Service, place: str, status: int, kind: type[KestrelError], words: str
) -> None:
    if place == "api":
        service.api.answers[API_PATH] = answer(status)
    else:
        service.files.answers[FILE_PATH] = answer(status)
    error = await failure(service.source())
    assert type(error) is kind
    assert words in str(error)
    assert service.left_overs() == []


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'"url"', b'{"uri": 1}', b'{"url": null}', b'{"url": 7}', b'{"url": ""}', b"[" * 50_000],
)
async def test_an_answer_without_a_usable_url_is_refused(service: Service, body: bytes) -> None:
    service.api.answers[API_PATH] = answer(200, body)
    assert type(await failure(service.source())) is AdapterSourceError


@pytest.mark.parametrize(
    "url",
    [
        "http://files.example/x",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "https://user:secret@files.example/x",
        "//files.example/x",
        "/etc/passwd",
        "http://127.0.0.1.example.org/",
        "http://169.254.169.254/latest/meta-data",
        "https://",
    ],
)
async def test_only_https_is_followed_but_for_the_own_machine(service: Service, url: str) -> None:
    service.api.answers[API_PATH] = presigned(url)
    assert "not https" in str(await failure(service.source()))
    assert service.files.requests == []


async def test_the_service_must_not_redirect_the_key(service: Service) -> None:
    service.api.answers[API_PATH] = answer(302, b"", f"Location: {service.files.url}/steal")
    assert "redirect" in str(await failure(service.source()))
    assert service.files.requests == []


async def test_a_file_may_move_a_few_times(service: Service) -> None:
    service.files.answers[FILE_PATH] = answer(302, b"", "Location: /moved")
    service.files.answers["/moved"] = answer(302, b"", f"Location: {service.files.url}/there")
    service.files.answers["/there"] = answer(200, CONTENT)
    assert (await service.source().fetch(ID)).path.read_bytes() == CONTENT


@pytest.mark.parametrize("location", ["http://files.example/x", "file:///etc/passwd", "https://[", "\x7f://"])
async def test_a_file_may_not_move_to_a_place_that_is_not_safe(service: Service, location: str) -> None:
    service.files.answers[FILE_PATH] = answer(302, b"", f"Location: {location}")
    assert isinstance(await failure(service.source()), AdapterSourceError)


async def test_a_circle_of_redirects_ends(service: Service) -> None:
    service.files.answers[FILE_PATH] = answer(302, b"", f"Location: {FILE_PATH}")
    assert "more than 3 times" in str(await failure(service.source()))


def cut_short(length: bool) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n" if length else "HTTP/1.1 200 OK\r\n\r\n"
        writer.write(head.encode() + CONTENT[: len(CONTENT) // 2])
        await writer.drain()

    return write


@pytest.mark.parametrize("length", [True, False])
async def test_a_body_that_breaks_off_is_not_kept_and_the_next_request_heals(service: Service, length: bool) -> None:
    service.files.answers[FILE_PATH] = cut_short(length)
    source = service.source()
    assert type(await failure(source)) is AdapterSourceError
    assert service.left_overs() == []
    assert await source.list() == []
    service.files.answers[FILE_PATH] = answer(200, CONTENT)
    assert (await source.fetch(ID)).path.read_bytes() == CONTENT


@pytest.mark.parametrize("body", [b"", b"<html>an error page</html>", b"PK\x03\x04 half a zip", bytes(5000)])
async def test_what_is_no_adapter_file_is_not_kept(service: Service, body: bytes) -> None:
    service.files.answers[FILE_PATH] = answer(200, body)
    assert "no complete adapter file" in str(await failure(service.source()))
    assert service.left_overs() == []


async def test_compressed_answers_are_refused(service: Service) -> None:
    service.files.answers[FILE_PATH] = answer(200, CONTENT, "Content-Encoding: gzip")
    assert "compressed" in str(await failure(service.source()))


async def test_a_file_above_the_limit_is_refused_by_its_head_or_when_it_grows(service: Service) -> None:
    source = service.source(max_bytes=1000)
    assert "more than 1000 bytes" in str(await failure(source))
    service.files.answers[FILE_PATH] = b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT
    assert "more than 1000 bytes" in str(await failure(source))
    assert service.left_overs() == []


async def test_a_huge_answer_of_the_service_is_not_read_to_its_end(service: Service) -> None:
    service.api.answers[API_PATH] = answer(200, b" " * 10**6)
    assert "bytes of JSON" in str(await failure(service.source()))


async def test_silence_and_slowness_end(service: Service) -> None:
    never = asyncio.Event()
    service.files.answers[FILE_PATH] = slow(CONTENT, never)
    silent = await failure(service.source(read_timeout_s=0.2))
    assert type(silent) is AdapterSourceTimeout
    assert "did not answer in time" in str(silent)
    late = await failure(service.source(total_timeout_s=0.3))
    assert type(late) is AdapterSourceTimeout
    assert "0.3 s" in str(late)
    assert service.left_overs() == []
    never.set()


async def test_nobody_listening_is_said(tmp_path: Path) -> None:
    source = HostedSource(KEY, tmp_path, base_url="http://127.0.0.1:9")
    assert "could not be reached" in str(await failure(source))


async def test_a_cache_folder_that_cannot_be_written_is_said(service: Service) -> None:
    service.cache.write_bytes(b"a file where the folder should be")
    assert "adapter_cache_dir" in str(await failure(service.source()))


# ---------------------------------------------------------------------- several callers


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


# ---------------------------------------------------------------------- settings


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


# ---------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "adapter_id", "path"),
    [
        ("/a/{id}.safetensors", AdapterId("cats"), "/a/cats.safetensors"),
        ("/a/{id}.safetensors", AdapterId("cats", "12"), "/a/cats%4012.safetensors"),
        ("/{finetune_id}/{step}/final.pt?v=1", AdapterId("cats", "12"), "/cats/12/final.pt?v=1"),
        ("/{finetune_id}.pt", AdapterId("cats"), "/cats.pt"),
    ],
)
async def test_a_template_is_filled_with_the_id(
    tmp_path: Path, template: str, adapter_id: AdapterId, path: str
) -> None:
    async with host() as server:
        server.answers[path] = answer(200, CONTENT)
        copy = await UrlTemplateSource(server.url + template, tmp_path).fetch(adapter_id)
    assert copy.path.read_bytes() == CONTENT
    assert copy.path.suffix == ".safetensors"


@pytest.mark.parametrize(
    ("template", "adapter_id"), [("/{finetune_id}.pt", AdapterId("a", "1")), ("/{finetune_id}/{step}", AdapterId("a"))]
)
async def test_a_template_never_drops_or_invents_a_step(tmp_path: Path, template: str, adapter_id: AdapterId) -> None:
    async with host() as server:
        error = await failure(UrlTemplateSource(server.url + template, tmp_path), adapter_id)
        assert type(error) is AdapterNotFound
        assert server.requests == []


async def test_sources_do_not_share_files_under_the_same_id(service: Service) -> None:
    await service.source().fetch(ID)
    async with host() as server:
        source = UrlTemplateSource(server.url + "/{id}", service.cache)
        assert type(await failure(source)) is AdapterNotFound
        assert await source.list() == []


async def test_a_denied_template_points_to_its_setting(tmp_path: Path) -> None:
    async with host() as server:
        server.answers["/cats"] = answer(403)
        error = await failure(UrlTemplateSource(server.url + "/{id}", tmp_path), AdapterId("cats"))
    assert "adapter_url_template" in str(error)


def test_a_template_over_plain_http_is_for_the_own_machine_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="https"):
        UrlTemplateSource("http://example.org/{id}", tmp_path)
