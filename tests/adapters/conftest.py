"""The hosted service, played by two servers on the loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.adapters.adapter_hosts import answer, host, presigned
from tests.adapters.hosted_service import API_PATH, CONTENT, FILE_PATH, Service


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with host() as api, host() as files:
        api.answers[API_PATH] = presigned(files.url + FILE_PATH)
        files.answers[FILE_PATH] = answer(200, CONTENT)
        yield Service(api, files, tmp_path / "cache")
