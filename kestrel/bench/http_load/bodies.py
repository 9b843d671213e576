"""The requests of a run: one body per picture, ready to send, used in turn."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.errors import ConfigError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PROMPTS = {"query": "Describe the image.", "point": "person", "detect": "person", "segment": "person"}
"""What is asked when no prompt is given, by skill."""


@dataclass(frozen=True)
class Ask:
    """What every request asks; the picture alone differs."""

    skill: str
    prompt: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    stream: bool = False

    def body(self, image: Path | None) -> bytes:
        fields: dict[str, Any] = {"settings": {"temperature": self.temperature}, "stream": self.stream}
        if self.skill in ("point", "detect", "segment"):
            fields["object"] = self.prompt or PROMPTS[self.skill]
        elif self.skill != "caption":
            fields["question"] = self.prompt or PROMPTS["query"]
        if self.max_new_tokens is not None:
            bound = "max_objects" if self.skill in ("point", "detect") else "max_tokens"
            fields["settings"][bound] = self.max_new_tokens
        if image is not None:
            fields["image_url"] = data_url(image)
        return json.dumps(fields).encode()


def skill_of(url: str) -> str:
    """The last word of the path, such as query."""
    return url.split("?")[0].rstrip("/").rsplit("/", 1)[-1]


def data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def bodies(ask: Ask, images: Sequence[Path]) -> list[bytes]:
    return [ask.body(image) for image in images] or [ask.body(None)]


def find_images(files: Sequence[Path], folder: Path | None) -> list[Path]:
    """The named files and those of the folder, in order. Raises ConfigError for what is not there."""
    for path in files:
        if not path.is_file():
            raise ConfigError("--image", f"{path} is no file; name a picture")
    images = list(files)
    if folder is not None:
        found = sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise ConfigError("--image-dir", f"{folder} holds no pictures; give another folder")
        images += found
    return images
