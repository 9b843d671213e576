"""The page at /docs: everything the description tells, commands that work, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex

import httpx
import pytest

from tests.server.conftest import KEYS, SCENE_BYTES, RunningServer
from tests.server.test_api_schema import operations


@pytest.fixture(scope="module")
def page(server: RunningServer) -> str:
    with server.client() as client:
        return client.get("/docs").text


def test_the_page_tells_every_route_and_every_field(page: str, server: RunningServer) -> None:
    schema = server.app.openapi()
    articles = page.split("<article ")[1:]
    assert len(articles) == len(operations(schema))
    for path, method in operations(schema):
        name = f"{method.upper()} <code>{html.escape(path)}</code>"
        (article,) = [one for one in articles if f"<h3>{name}</h3>" in one]
        assert f">{name}</a>" in page.split("</nav>")[0]
        body = schema["paths"][path][method].get("requestBody", {}).get("content", {}).get("application/json", {})
        told = re.findall(r"<tr><td>(?:<strong>)?<code>(.*?)</code>", article)
        assert [field for field in body.get("schema", {}).get("properties", ()) if field not in told] == []


def test_pictures_come_first_what_all_routes_take_last_and_no_bound_is_a_machine_s(page: str) -> None:
    for path in ("/v1/query", "/v1/detect"):
        article = page.split(f"<h3>POST <code>{path}</code></h3>")[1].split("</table>")[0]
        fields = re.findall(r"<tr><td>(?:<strong>)?<code>(.*?)</code>", article)
        assert fields[0] == "image_url"
        assert fields.index("stream") < fields.index("temperature")
    assert [number for number in re.findall(r"\d{10,}|\d[Ee]\+?\d+", page) if number != "1700000000"] == []


def test_values_are_written_as_json(page: str) -> None:
    written = [html.unescape(code) for code in re.findall(r"<code>(.*?)</code>", page)]
    assert '{"include_obfuscation": false}' in written
    assert [code for code in written if code in ("True", "False", "None") or code.startswith(("{'", "['"))] == []


def test_every_command_is_answered(page: str, client: httpx.Client) -> None:
    """All but those that name a stored response."""
    commands = [shlex.split(html.unescape(command)) for command in re.findall(r"<pre>(.*?)</pre>", page)]
    num_asked = 0
    for _, url, *words in commands:
        options = list(zip(words[::2], words[1::2], strict=True))
        if "RESPONSE_ID" in url:
            continue
        given = [value for option, value in options if option == "-d"]
        form = dict(value.split("=", 1) for option, value in options if option == "-F")
        path = url.removeprefix(str(client.base_url).rstrip("/")).replace("MODEL", "kestrel-tiny")
        if form:
            assert form.pop("image") == "@photo.jpg"
            response = client.post(path, data=form, files={"image": SCENE_BYTES})
        elif given:
            response = client.post(path, json=json.loads(given[0]))
        else:
            response = client.get(path)
        assert response.status_code == 200, (url, response.text)
        num_asked += 1
    assert num_asked > 20


def test_the_page_loads_nothing_and_needs_no_key(locked: RunningServer) -> None:
    with locked.client() as visitor:
        response = visitor.get("/docs")
    assert response.status_code == 200
    assert not any(key in response.text for key in KEYS)
    assert "Authorization: Bearer $KESTREL_API_KEY" in response.text
    links = set(re.findall(r'(?:src|href|action)="([^"#]*)', response.text))
    assert links == {"", ".", "openapi.json"}
    assert "<script" not in response.text
    (style,) = re.findall(r"<style>(.*?)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in response.headers["content-security-policy"]
    assert "prefers-color-scheme" in style or "color-scheme: light dark" in style
