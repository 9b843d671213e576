"""Downloads that go wrong: nothing half is kept, each failure has its type, and none says a key or a URL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kestrel.adapters.sources.downloads import Downloader, DownloadLimits
from kestrel.adapters.sources.remote import HostedSource
from kestrel.errors import (
    AdapterGone,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceDenied,
    AdapterSourceError,
    AdapterSourceTimeout,
    KestrelError,
)
from tests.adapters.adapter_hosts import answer, presigned, slow
from tests.adapters.hosted_service import API_PATH, CONTENT, FILE_PATH, ID, KEY, Service, cut_short, failure


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
    assert "not a complete adapter file" in str(await failure(service.source()))
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


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "http://localhost:8080/x", "http://[::1]/x"])
def test_https_never_leads_to_http_on_the_own_machine(url: str) -> None:
    downloader = Downloader("the service", DownloadLimits(), "the key")
    assert str(downloader.checked_url(url, httpx.URL("http://127.0.0.1"), "cats")) == url
    with pytest.raises(AdapterSourceError, match="not https"):
        downloader.checked_url(url, httpx.URL("https://api.example"), "cats")


async def test_a_proxy_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "gopher://proxy.example")
    error = await failure(HostedSource(KEY, tmp_path))
    assert "https_proxy" in str(error)
