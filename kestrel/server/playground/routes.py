"""Routes of the playground: the page at `/`, its files, its samples, and what it must know of this server.

None of them needs a key: the page asks its visitor for one and sends it with the calls it makes. Whatever lies in
`page/` is served, and nothing else is. Scripts, styles and samples are addressed below a digest of all files, so a
browser may keep them for good: another release has other addresses. Only the page itself is asked for again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__, default_model
from kestrel.engine.served import ServedEngine
from kestrel.server.facts import model_facts
from kestrel.server.openai.chat import MAX_IMAGES
from kestrel.server.responses import json_response
from kestrel.server.state import state_of

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
SAMPLES = "samples/samples.json"
ASSETS_MARK = b"{{assets}}"
"""Where the page names the folder of its files."""
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
KEEP = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


@dataclass(frozen=True, slots=True)
class Page:
    """`files` by their address below /playground/, such as 3f2a…/app.js."""

    index: Asset
    samples: Asset
    files: Mapping[str, Asset]


def read_page(folder: Path = FOLDER) -> Page:
    assets = {str(path.relative_to(folder).as_posix()): _read(path) for path in sorted(folder.rglob("*.*"))}
    version = _version(assets)
    index = assets.pop(INDEX)
    index = Asset(index.body.replace(ASSETS_MARK, f"playground/{version}".encode()), index.media_type)
    samples = assets.pop(SAMPLES)
    return Page(index, samples, {f"{version}/{name}": asset for name, asset in assets.items()})


def _read(path: Path) -> Asset:
    return Asset(path.read_bytes(), MEDIA_TYPES[path.suffix])


def _version(assets: Mapping[str, Asset]) -> str:
    digest = hashlib.sha256()
    for name, asset in assets.items():
        digest.update(f"{name} {asset.etag}\n".encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------- routes


def playground_routes(page: Page | None = None) -> APIRouter:
    """Everything the playground needs; `page` defaults to the one in the package."""
    shown = page or read_page()
    routes = APIRouter(include_in_schema=False)

    async def index(request: Request) -> Response:
        return _asset_response(request, shown.index, ASK_AGAIN)

    async def samples(request: Request) -> Response:
        return _asset_response(request, shown.samples, ASK_AGAIN)

    async def asset(request: Request, name: str) -> Response:
        if name not in shown.files:
            raise HTTPException(404)
        return _asset_response(request, shown.files[name], KEEP)

    for path, endpoint in (
        ("/", index),
        ("/playground/samples.json", samples),
        ("/playground/server.json", _server),
        ("/playground/{name:path}", asset),
    ):
        routes.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    return routes


def _asset_response(request: Request, asset: Asset, cache_control: str) -> Response:
    """The asset, or 304 for a browser that has it."""
    headers = {**SECURITY_HEADERS, "etag": asset.etag, "cache-control": cache_control}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


async def _server(request: Request) -> Response:
    """What the page shows of the server, and the limits it keeps to. Facts that open routes tell anyway."""
    state = state_of(request)
    engine = state.engine
    body = {
        "version": __version__,
        "status": state.phase.value,
        "needs_key": state.config.has_keys,
        "max_body_bytes": state.config.max_body_bytes,
        "model": state.model_name,
        **({} if engine is None else _model_facts(engine)),
    }
    return json_response(body, headers={**SECURITY_HEADERS, "cache-control": "no-store"})


def _model_facts(engine: ServedEngine) -> dict[str, object]:
    profile = engine.profile
    facts = model_facts(engine)
    unshown = ("embed", "complete") if profile.has_vision else ("embed",)
    return {
        "skills": [skill for skill in facts["skills"] if skill not in unshown],
        "reads_pictures": facts["reads_pictures"],
        "max_chat_pictures": _max_chat_pictures(engine),
        "can_reason": facts["can_reason"],
        "context_tokens": engine.max_model_length,
        "is_demonstration": engine.model_name == default_model.NAME,
        "max_image_bytes": engine.config.max_image_bytes,
        "defaults": {**facts["defaults"], "max_objects": profile.defaults.max_objects},
    }


def _max_chat_pictures(engine: ServedEngine) -> int:
    """How many the context has room for, with words beside them."""
    if not engine.profile.has_vision:
        return 0
    return min(MAX_IMAGES, (engine.max_model_length - 1) // engine.num_image_positions)
