"""From a configuration to its sources, in the order that the documentation promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import configured_sources
from kestrel.config import RuntimeConfig
from kestrel.errors import AdapterNotFound, ConfigError
from tests.adapters.adapter_files import HOSTED
from tests.adapters.adapter_hosts import answer, host


async def test_the_folder_comes_before_the_url_and_the_url_before_the_service(tmp_path: Path) -> None:
    async with host() as server:
        config = RuntimeConfig(
            adapter_dir=tmp_path, adapter_url_template=server.url + "/{id}", adapter_cache_dir=tmp_path / "cache"
        )
        sources = configured_sources(config, "key")
        assert sources.title == "the adapter folder and the server of adapter_url_template and the hosted service"
        server.answers["/cats"] = answer(200, HOSTED.read_bytes())
        assert (await sources.fetch(AdapterId("cats"))).path.is_relative_to(tmp_path / "cache")
        (tmp_path / "cats.pt").write_bytes(b"local")
        assert (await sources.fetch(AdapterId("cats"))).path == tmp_path / "cats.pt"
        assert [(listing.name, listing.source) for listing in await sources.list()] == [("cats", "the adapter folder")]
        await sources.close()


async def test_without_settings_and_key_nothing_is_asked() -> None:
    sources = configured_sources(RuntimeConfig())
    assert await sources.list() == []
    with pytest.raises(AdapterNotFound, match="MOONDREAM_API_KEY"):
        await sources.fetch(AdapterId("cats", "1"))


async def test_downloads_go_to_the_user_s_cache_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with host() as server:
        server.answers["/cats"] = answer(200, HOSTED.read_bytes())
        sources = configured_sources(RuntimeConfig(adapter_url_template=server.url + "/{id}"))
        copy = await sources.fetch(AdapterId("cats"))
    assert copy.path.is_relative_to(tmp_path / "kestrel" / "adapters")


def test_a_folder_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_dir"):
        configured_sources(RuntimeConfig(adapter_dir=tmp_path / "none"))
