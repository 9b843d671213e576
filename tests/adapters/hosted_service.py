"""The hosted service and the host of its files on the loopback, and what every failure of theirs must keep to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources.downloads import DownloadLimits
from kestrel.adapters.sources.remote import HostedSource
from kestrel.adapters.sources.source import AdapterSource
from kestrel.errors import (
    KestrelError,
)
from tests.adapters.adapter_files import HOSTED
from tests.adapters.adapter_hosts import Answer, Host

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


async def failure(source: AdapterSource, adapter_id: AdapterId = ID) -> KestrelError:
    """The error of one request; every one of them names the adapter and keeps secrets."""
    with pytest.raises(KestrelError) as caught:
        await source.fetch(adapter_id)
    message = str(caught.value)
    assert f"'{adapter_id}'" in message
    for secret in (KEY, SIGNATURE, "127.0.0.1", "bucket", "/tmp"):
        assert secret not in message
    return caught.value


def cut_short(length: bool) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n" if length else "HTTP/1.1 200 OK\r\n\r\n"
        writer.write(head.encode() + CONTENT[: len(CONTENT) // 2])
        await writer.drain()

    return write
