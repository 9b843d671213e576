"""Review pages: HTML files that load nothing from anywhere, with every picture's thumbnail and what was found in it.

Rows are read once and written as they come, so that memory stays flat. What only the end can tell, such as the names of
all pages, stands behind the pictures.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import simplejpeg

from kestrel.errors import KestrelError
from kestrel.images.encoded import EncodedPicture, ImageLimits
from kestrel.images.picture import at_most
from kestrel.labelling.records import Row
from kestrel.labelling.review.decisions import UNDECIDED, VERSION, digest_of, place_of

PAGE_PICTURES = 2000
THUMBNAIL_SIDE = 480
JPEG_QUALITY = 78
NUM_THREADS = 4
AT_A_TIME = 64
"""Pictures in memory."""
MARK = '<meta name="generator" content="kestrel review">'
SCRIPTS = ("data.js", "decisions.js", "drawing.js", "filters.js", "grid.js", "detail.js", "app.js")


def write_review(
    rows: Iterable[Row], read: Callable[[Row], bytes], target: Path, title: str, *, honour_exif: bool = True
) -> list[Path]:
    """Writes `target`, and review-2.html and so on beside it for further pictures; gives all their paths.

    `read` gives the encoded picture of a row, on a thread. One that cannot be read has its reason on its tile.
    The browser keeps decisions for the target's path: a page written again there shows them.
    """
    head, foot = _template(title)
    labels: set[str] = set()
    parts: list[Path] = []
    try:
        for _, group in itertools.groupby(_entries(rows, read, labels, honour_exif), lambda pair: pair[0]):
            parts.append(_partial(target, len(parts) + 1))
            _write(parts[-1], "w", itertools.chain([head], (entry for _, entry in group)))
        if not parts:
            parts.append(_partial(target, 1))
            _write(parts[0], "w", [head])
        paths = [_path(target, number) for number in range(1, len(parts) + 1)]
        for part, path in zip(parts, paths, strict=True):
            facts = _facts(target, title, path, paths, sorted(labels, key=lambda text: (text.casefold(), text)))
            _write(part, "a", [_data("facts", facts), foot])
        for part, path in zip(parts, paths, strict=True):
            os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    _remove_further(target, len(paths) + 1)
    return paths


def _path(target: Path, number: int) -> Path:
    return target if number == 1 else target.with_name(f"{target.stem}-{number}{target.suffix}")


def _partial(target: Path, number: int) -> Path:
    return target.with_name(f".{_path(target, number).name}.partial")


def _write(path: Path, mode: str, texts: Iterable[str]) -> None:
    with path.open(mode, encoding="utf-8", errors="replace") as file:
        file.writelines(texts)


def _remove_further(target: Path, number: int) -> None:
    """Pages of an earlier, longer run."""
    while (path := _path(target, number)).is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            if MARK not in file.read(2000):
                return
        path.unlink()
        number += 1


# ---------------------------------------------------------------------- around the pictures


def _template(title: str) -> tuple[str, str]:
    """What stands before the pictures and behind them. The policy lets nothing run but our own script."""
    style, script = _beside("style.css"), "".join(["'use strict';\n{\n", *map(_beside, SCRIPTS), "}\n"])
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src {_source_hash(style)}",
            f"script-src {_source_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    page = Template(_beside("index.html")).substitute(
        mark=MARK, policy=policy, title=escape(title), style=style, script=script
    )
    head, _, foot = page.partition("<!-- pictures -->\n")
    return head, foot


def _beside(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _facts(target: Path, title: str, path: Path, paths: list[Path], labels: list[str]) -> dict[str, Any]:
    job = hashlib.blake2b(os.fsencode(target.resolve()), digest_size=8).hexdigest()
    return {
        "version": VERSION,
        "job": job,
        "title": title,
        "page": paths.index(path),
        "pages": [quote(one.name, errors="replace") for one in paths],
        "labels": labels,
        "export": f"{path.stem}-decisions.json",
    }


def _data(kind: str, value: Any) -> str:
    """JSON of ASCII alone in which no tag can begin or end, whatever the texts are."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" class="{kind}">{text}</script>\n'


# ---------------------------------------------------------------------- pictures


def _entries(
    rows: Iterable[Row], read: Callable[[Row], bytes], labels: set[str], honour_exif: bool
) -> Iterator[tuple[int, str]]:
    """(page, what stands there for one row)."""
    # What was labelled was within the limits that held then.
    limits = ImageLimits(max_pixels=2**32, max_bytes=2**40, honour_exif=honour_exif)
    remaining = iter(rows)
    count = itertools.count()
    with ThreadPoolExecutor(NUM_THREADS, "kestrel-review") as pool:
        while batch := list(itertools.islice(remaining, AT_A_TIME)):
            for row, entry in zip(batch, pool.map(lambda row: _entry(row, read, limits), batch), strict=True):
                labels.update(found.label for found in row.found)
                yield next(count) // PAGE_PICTURES, entry


def _entry(row: Row, read: Callable[[Row], bytes], limits: ImageLimits) -> str:
    thumbnail, size, unread = b"", (4, 3), None
    if row.error is None:
        try:
            picture = at_most(EncodedPicture(read(row), limits).load(), THUMBNAIL_SIDE, "")
        except (OSError, ValueError, KestrelError) as error:
            unread = str(error) or type(error).__name__
        else:
            thumbnail = simplejpeg.encode_jpeg(picture.pixels, JPEG_QUALITY, "RGB", "420")
            size = picture.width, picture.height
    encoded = base64.b64encode(thumbnail).decode()
    return f'{_data("row", _view(row, size, unread))}<script type="text/plain" class="thumb">{encoded}</script>\n'


def _view(row: Row, size: tuple[int, int], unread: str | None) -> dict[str, Any]:
    """What the page knows of a row; values that say nothing are left out."""
    objects = [
        {
            "label": one.label,
            "score": None if one.score is None else round(one.score, 4),
            "place": place_of(one),
            "path": one.path,
            "decision": one.decision or UNDECIDED,
        }
        for one in row.found
    ]
    view = {
        "key": row.key,
        "file": row.file,
        "about": digest_of(row),
        "thumb": size,
        "width": row.width,
        "height": row.height,
        "objects": objects,
        "question": row.question,
        "answer": row.answer,
        "error": row.error,
        "unread": unread,
        "frame": None if row.frame is None else asdict(row.frame),
        "decision": row.decision or UNDECIDED,
    }
    return {name: value for name, value in view.items() if value is not None}
