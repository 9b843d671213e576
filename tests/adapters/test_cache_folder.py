"""The folder of downloads: bounded, shared by processes, without what dead ones left behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import remote
from kestrel.adapters.sources.disk_cache import AdapterDiskCache, CacheFolder, NoRoom, PartialFile
from kestrel.adapters.sources.downloads import DownloadLimits
from kestrel.adapters.sources.remote import UrlTemplateSource
from kestrel.errors import AdapterSourceBusy, AdapterSourceError
from tests.adapters.adapter_hosts import Host, answer, host, slow
from tests.adapters.hosted_service import CONTENT, failure

ROOM = 1024
"""For the small files beside the contents."""


def kept(folder: Path) -> int:
    return len(list(folder.glob("*/*.safetensors")))


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def source_of(server: Host, cache: Path, num_adapters: float) -> UrlTemplateSource:
    max_bytes = int(num_adapters * (len(CONTENT) + ROOM))
    return UrlTemplateSource(server.url + "/{id}", cache, max_cache_bytes=max_bytes, limits=DownloadLimits())


async def test_the_least_recently_used_make_way_and_the_bound_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TOUCHED_EVERY_S", 0.0)
    async with host() as server:
        for name in "abcd":
            server.answers[f"/{name}"] = answer(200, CONTENT)
        source = source_of(server, tmp_path, 3)
        for name in "abc":
            await source.fetch(AdapterId(name))
            await asyncio.sleep(0.02)  # times of files are that coarse
        await source.fetch(AdapterId("a"))
        await source.fetch(AdapterId("d"))
        assert {listing.name for listing in await source.list()} == {"a", "c", "d"}
        assert total(tmp_path) <= 3 * (len(CONTENT) + ROOM)
        assert (await source.fetch(AdapterId("b"))).path.read_bytes() == CONTENT
        assert server.count("/b") == 2
        await source.close()


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_file_that_can_never_fit_is_refused_with_the_setting_and_nothing_makes_way(
    tmp_path: Path, is_declared: bool
) -> None:
    async def without_length(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT * 2)
        await writer.drain()

    async with host() as server:
        server.answers["/small"] = answer(200, CONTENT)
        server.answers["/large"] = answer(200, CONTENT * 2) if is_declared else without_length
        source = source_of(server, tmp_path, 1.5)
        await source.fetch(AdapterId("small"))
        error = await failure(source, AdapterId("large"))
        assert type(error) is AdapterSourceError
        assert "adapter_cache_bytes" in str(error)
        assert (kept(tmp_path), list(tmp_path.glob(".download-*"))) == (1, [])
        await source.close()


async def test_what_is_being_downloaded_counts(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with host() as server:
        server.answers["/slow"] = slow(CONTENT, never)
        server.answers["/fast"] = answer(200, CONTENT)
        source = source_of(server, tmp_path, 1.5)
        task = asyncio.create_task(source.fetch(AdapterId("slow")))
        async with asyncio.timeout(30):
            while not any(path.stat().st_size for path in tmp_path.glob(".download-*")):
                await asyncio.sleep(0.01)
        error = await failure(source, AdapterId("fast"))
        assert type(error) is AdapterSourceBusy
        never.set()
        assert (await task).path.read_bytes() == CONTENT
        assert (await source.fetch(AdapterId("fast"))).path.read_bytes() == CONTENT
        assert kept(tmp_path) == 1
        await source.close()


def test_a_sweep_removes_what_dead_programs_left_and_spares_what_is_being_written(tmp_path: Path) -> None:
    cache, folder = AdapterDiskCache(tmp_path, "somewhere"), CacheFolder(tmp_path, 10**6)
    done, writing = PartialFile(folder), PartialFile(folder)
    done.start(7)
    cache.keep("whole", done.path, done.finish(b"content"), ".pt")
    done.discard()
    writing.start(10)
    if (child := os.fork()) == 0:
        try:
            PartialFile(CacheFolder(tmp_path)).start(100)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    orphan = tmp_path / ("0" * 40)
    orphan.mkdir()
    (orphan / f"{'0' * 64}.pt").write_bytes(b"no checksum")
    (tmp_path / "somebody's own").mkdir()
    (tmp_path / "somebody's own" / "file").write_bytes(b"")
    assert len(list(tmp_path.glob(".download-*"))) == 2
    folder.sweep()
    assert list(tmp_path.glob(".download-*")) == [writing.path]
    assert not orphan.exists()
    assert cache.find("whole") is not None
    assert (tmp_path / "somebody's own" / "file").exists()
    writing.discard()
    assert list(tmp_path.glob(".download-*")) == []


def test_a_sweep_with_a_smaller_bound_makes_room(tmp_path: Path) -> None:
    cache = AdapterDiskCache(tmp_path, "somewhere")
    for number in range(4):
        partial = cache.partial_file()
        partial.start(1000)
        copy = cache.keep(str(number), partial.path, partial.finish(bytes(1000)), ".pt")
        partial.discard()
        os.utime(copy.path.parent / "checksum.json", (time.time() + number, time.time() + number))
    CacheFolder(tmp_path, 3000).sweep()
    assert [cache.find(str(number)) is not None for number in range(4)] == [False, False, True, True]


def test_a_full_disk_is_said_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.adapters.sources.disk_cache.MIN_FREE_BYTES", 2**62)
    partial = PartialFile(CacheFolder(tmp_path))
    with pytest.raises(NoRoom, match="the disk is full"):
        partial.start(1000)
    partial.discard()
