"""Adapters from any web server: the id filled into a URL, and nothing dropped or invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel.adapters import AdapterId
from kestrel.adapters.sources.remote import UrlTemplateSource
from kestrel.errors import (
    AdapterNotFound,
    ConfigError,
)
from tests.adapters.adapter_hosts import answer, host
from tests.adapters.hosted_service import CONTENT, ID, Service, failure


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
