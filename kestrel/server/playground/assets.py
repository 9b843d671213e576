"""The page's files, read once from the package. Whatever lies in `page/` is served, and nothing else is.

Scripts, styles and samples are addressed below a digest of all files, so a browser may keep them for good: another
release has other addresses. Only the page itself is asked for again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
