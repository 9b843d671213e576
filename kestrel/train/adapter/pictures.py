"""The pictures of a data folder: inside it, readable, not too large, and known by what they show.

Two files with equal pixels are one picture, so that a copy under another name cannot stand on both sides of a split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from kestrel.errors import RequestError, shown
from kestrel.images.decode import decode_image
from kestrel.images.encoded import ImageLimits
from kestrel.images.rgb import RgbImage
from kestrel.models.contract import DecoderModel
from kestrel.train.adapter.mistakes import Mistake


@dataclass(frozen=True)
class Picture:
    path: Path
    digest: str
    height: int
    width: int


class PictureFolder:
    """Looks at pictures once each; nothing of them is kept but their size and digest."""

    def __init__(self, folder: Path, limits: ImageLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._seen: dict[str, Picture | Mistake] = {}

    def find(self, name: object, under: str = "") -> Picture:
        """The picture of that name below the folder (and below `under` in it). Raises `Mistake`."""
        if not isinstance(name, str) or not name.strip():
            raise Mistake("image", f"must be the path of a picture inside the data folder (got {shown(name)})")
        key = str(PurePosixPath(under, name)) if under and not PurePosixPath(name).is_absolute() else name
        if key not in self._seen:
            try:
                self._seen[key] = self._look_at(key)
            except Mistake as mistake:
                self._seen[key] = mistake
        found = self._seen[key]
        if isinstance(found, Mistake):
            raise found
        return found

    def exists(self, name: str, under: str) -> bool:
        return (self._folder / under / name).is_file()

    def read(self, picture: Picture) -> RgbImage:
        return decode_image(picture.path, self._limits)

    def _look_at(self, name: str) -> Picture:
        if PurePosixPath(name).is_absolute() or Path(name).is_absolute():
            raise Mistake("image", f"{shown(name)} is an absolute path; give one relative to the data folder")
        if ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise Mistake("image", f"{shown(name)} leaves the data folder; copy the picture into it")
        path = self._folder / name
        try:
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise Mistake("image", f"{shown(name)} is a link out of the data folder; copy the picture into it")
            image = decode_image(_unexpanded(path), self._limits)
        except RequestError as error:
            raise Mistake("image", f"{shown(name)}: {str(error).removeprefix('image: ')}") from error
        except (OSError, ValueError) as error:
            if isinstance(error, Mistake):
                raise
            raise Mistake(
                "image", f"{shown(name)} is not a path that can be read ({error}); rename the file"
            ) from error
        return Picture(path, image.digest, image.height, image.width)


def _unexpanded(path: Path) -> str:
    """A relative path may begin with `~`, which would mean the home folder."""
    return os.path.abspath(path)


class EmbeddedPictures:
    """What the frozen vision tower makes of each picture: computed once and kept up to a bound, else computed again.

    Kept values are the computed ones bit by bit, so the bound changes the time a run takes and nothing else.
    """

    def __init__(
        self, folder: PictureFolder, decoder: DecoderModel, pictures: Sequence[Picture], max_bytes: int
    ) -> None:
        self._folder = folder
        self._decoder = decoder
        self._pictures = pictures
        shape = decoder.shape
        each = shape.num_image_positions * shape.hidden_dim * decoder.dtype.itemsize
        self.num_kept = min(len(pictures), max_bytes // each)
        self._kept: dict[int, Tensor] = {}

    def prepare(self, on_picture: Callable[[int, int], None], should_stop: Callable[[], bool]) -> None:
        """Computes what will be kept. Whoever stops it early gets the rest computed when it is asked for."""
        for index in range(self.num_kept):
            if should_stop():
                return
            self._kept[index] = self._embed(index)
            on_picture(index + 1, self.num_kept)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """[B, patches, dim] on the model's device."""
        return torch.stack([self._one(index) for index in indices])

    def _one(self, index: int) -> Tensor:
        if index not in self._kept:
            found = self._embed(index)
            if index >= self.num_kept:
                return found
            self._kept[index] = found
        return self._kept[index]

    def _embed(self, index: int) -> Tensor:
        with torch.no_grad():
            prepared = self._decoder.prepare_image(self._folder.read(self._pictures[index]))
            return self._decoder.embed_images([prepared])[0]
