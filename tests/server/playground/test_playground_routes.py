"""The page as files: what is served to whom, how long it may be kept, and that it hangs together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from PIL import Image

from kestrel.engine import InferenceEngine
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.playground.routes import FOLDER, read_page
from tests.server.playground.scenes import samples

MAX_SAMPLE_BYTES = 60_000


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Of a server that needs a key and whose model never comes."""

    async def never() -> InferenceEngine:
        await asyncio.Event().wait()
        raise AssertionError

    app = create_app(never, ServerConfig(api_keys=("secret",), max_requests_per_client=1))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        yield client


def addresses_in(page: str) -> list[str]:
    return re.findall(r'(?:src|href)="([^"#]+)"', page)


async def test_the_page_and_all_it_names_load_without_a_key(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    addresses = [address for address in addresses_in(page.text) if address != "docs"]
    assert len(addresses) >= 5
    for address in [*addresses, "playground/samples.json", "playground/server.json"]:
        assert (await client.get(f"/{address}")).status_code == 200, address
    assert (await client.post("/v1/query", json={})).status_code == 401


async def test_every_imported_module_and_every_sample_is_served(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    folder = next(address for address in addresses_in(page) if address.endswith("/app.js")).removesuffix("/app.js")
    imported = {name for path in FOLDER.glob("*.js") for name in re.findall(r'from "\./(\w+\.js)"', path.read_text())}
    assert len(imported) > 15
    for name in [*imported, *(f"samples/{sample['file']}" for sample in samples())]:
        response = await client.get(f"/{folder}/{name}")
        assert response.status_code == 200, name
        assert "immutable" in response.headers["cache-control"]


async def test_a_browser_that_has_the_page_is_told_so(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    tag = page.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await client.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b""), known
        assert again.headers["etag"] == tag
    assert (await client.get("/", headers={"if-none-match": '"other"'})).status_code == 200


def test_a_changed_file_changes_every_address(tmp_path: Path) -> None:
    before = read_page()
    folder = tmp_path / "page"
    for path in FOLDER.rglob("*.*"):
        copy = folder / path.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes() + (b"\n" if path.name == "api.js" else b""))
    after = read_page(folder)
    assert not set(before.files) & set(after.files)
    assert before.index.etag != after.index.etag


@pytest.mark.parametrize("name", ["", "app.js", "%2e%2e/routes.py", "x%2f..%2f..%2fassets.py", "index.html"])
async def test_only_the_pages_own_files_are_served(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/playground/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_the_policy_lets_the_page_reach_its_server_alone(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/")).headers["content-security-policy"]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    for name in ("script-src", "style-src", "connect-src"):
        assert rules[name] == ["'self'"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_holds_no_address_of_another_site_and_no_inline_code() -> None:
    index = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)", index) == []
    assert re.findall(r'\sstyle="|\son\w+="', index) == []
    for path in [*FOLDER.glob("*.html"), *FOLDER.glob("*.css"), *FOLDER.glob("*.js")]:
        outside = set(re.findall(r"https?://[^\s\"'`$)]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert outside == set(), path.name
    assert [address for address in addresses_in(index) if address.startswith("/")] == []  # works below a proxy's path


def test_samples_are_small_and_as_large_as_they_say() -> None:
    listed = samples()
    assert len(listed) >= 6
    for sample in listed:
        path = FOLDER / "samples" / sample["file"]
        assert path.stat().st_size <= MAX_SAMPLE_BYTES
        with Image.open(path) as picture:
            assert picture.size == (sample["width"], sample["height"])


async def test_the_page_learns_what_it_must_know_of_its_server(client: httpx.AsyncClient) -> None:
    facts = (await client.get("/playground/server.json")).json()
    assert facts["status"] == "starting"
    assert facts["needs_key"] is True
    assert facts["max_body_bytes"] == ServerConfig().max_body_bytes
    assert facts["model"] is None
