"""The door for pictures: whatever a caller may hand over -> RgbImage, under limits."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.encoded import EncodedPicture, ImageLimits, canvas_from_pillow, reading
from kestrel.images.picture import Canvas, Picture, PictureForm, RgbImage, crops_digest, file_digest

FEW_BYTES = 2**17
"""They are compared in less time than it takes to hand them to another thread and back."""

PILLOW_BYTES_PER_PIXEL, VIPS_BYTES_PER_PIXEL = 5, 8
"""That reading them takes: a Pillow image may be opened and not read yet."""
RGB_BYTES_PER_PIXEL = 10
"""Beside what was decoded, while it becomes an RGB array."""
LARGE_PIXELS = 2**24
"""A model's device gets the pixels of smaller pictures. Of larger ones only parts become RGB at a time."""

_ACCEPTED = "encoded bytes, a path, a PIL image, a uint8 NumPy array, a pyvips image or an RgbImage"


@dataclass(frozen=True)
class OpenedImage:
    """A picture whose size is known and within limits, and whose pixels are not decoded."""

    height: int
    width: int
    work_bytes: int
    """The most that decoding takes, and reducing it to what a model needs."""
    load: Callable[[], Canvas]
    digest: str | None = None
    """Of a file; that of pixels is computed from them."""
    given: RgbImage | None = None
    """Decoded already by the caller."""
    max_crops: int | None = None
    """Most local crops that a model makes of it, where that was asked for."""
    file: SentFile | None = None

    @property
    def is_large(self) -> bool:
        return self.height * self.width > LARGE_PIXELS


def decode_image(source: Any, limits: ImageLimits, recent: RecentPictures | None = None) -> RgbImage:
    """Decode one picture; a file that is among the `recent` ones is taken from there.

    Bytes and paths are encoded files: `limits.honour_exif` applies to them. PIL and pyvips images and arrays are
    taken as they are. Alpha is dropped, not blended. Raises RequestError for everything that is not a picture.
    """
    found = find_or_open(source, limits, recent)
    picture = decode_opened(found, recent) if isinstance(found, OpenedImage) else found
    assert isinstance(picture, RgbImage)
    return picture


def find_or_open(source: Any, limits: ImageLimits, recent: RecentPictures | None = None) -> Picture | OpenedImage:
    """A file that is among the `recent` ones, or what is to be decoded."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        limits.check_bytes(memoryview(source).nbytes)
        return _find_or_open_file(bytes(source), limits, recent)
    if isinstance(source, (str, os.PathLike)):
        return _find_or_open_file(_read_file(source, limits), limits, recent)
    if isinstance(source, np.ndarray):
        canvas = Canvas(_pixels_from_array(np.asarray(source), limits))
        return _opened(canvas, limits, 3, lambda: canvas)
    if not isinstance(source, (RgbImage, Image.Image)) and not _is_vips_image(source):
        raise RequestError("image", f"a {type(source).__name__} is not a picture; pass {_ACCEPTED}")
    limits.check_size(source.height, source.width)
    if isinstance(source, RgbImage):
        return _opened(source, limits, 0, lambda: Canvas(source.pixels), source.digest, given=source)
    if isinstance(source, Image.Image):
        return _opened(source, limits, PILLOW_BYTES_PER_PIXEL, lambda: canvas_from_pillow(source))
    return _opened(source, limits, VIPS_BYTES_PER_PIXEL, lambda: Canvas(_pixels_from_vips(source, limits)))


def decode_opened(
    opened: OpenedImage,
    recent: RecentPictures | None = None,
    form: PictureForm | None = None,
    rest: Callable[[], object] = lambda: None,
) -> Picture:
    """The pixels, or, of a picture that a model does not take as it is, what the model needs of them.

    `rest` is called again and again while a large picture is reduced.
    """

    max_crops = opened.max_crops

    def decode() -> Picture:
        picture = decode_whole()
        if max_crops is None:
            return picture
        return replace(picture, digest=crops_digest(picture.digest, max_crops), max_crops=max_crops)

    def decode_whole() -> Picture:
        with reading("picture"):
            canvas = replace(opened.load(), rest=rest)
            if form is not None and not form.takes_as_it_is(opened.height, opened.width):
                return form.shrink(canvas, opened.digest or canvas.digest(), max_crops)
            if opened.given is not None:
                return opened.given
            if opened.digest is not None:
                return RgbImage.from_file(canvas.pixels(), opened.digest)
            return RgbImage.from_pixels(canvas.pixels(), copy=isinstance(canvas.stored, np.ndarray))

    if recent is None or opened.digest is None or opened.given is not None:
        return decode()
    return recent.get(crops_digest(opened.digest, max_crops), decode, opened.file)


def _opened(
    sized: Any,
    limits: ImageLimits,
    bytes_per_pixel: int,
    load: Callable[[], Canvas],
    digest: str | None = None,
    given: RgbImage | None = None,
) -> OpenedImage:
    """`bytes_per_pixel`: the most that `load` takes, and what is kept of it while it is reduced."""
    num_pixels = sized.height * sized.width
    work_bytes = num_pixels * bytes_per_pixel + min(num_pixels, LARGE_PIXELS) * RGB_BYTES_PER_PIXEL
    return OpenedImage(sized.height, sized.width, work_bytes, load, digest, given, limits.max_crops)


def known_images(sources: Sequence[Any], limits: ImageLimits, recent: RecentPictures) -> list[Picture] | None:
    """Small files that are all among the `recent` ones, immediately, for the event loop; None when one may not be."""
    files = [source for source in sources if isinstance(source, bytes) and len(source) <= limits.max_bytes]
    if len(files) < len(sources) or sum(map(len, files)) > FEW_BYTES:
        return None
    found: list[Picture] = []
    for file in files:
        picture = recent.find_file(SentFile(file, limits.honour_exif, limits.max_crops))
        if picture is None:
            return None
        found.append(picture)
    return found


def _find_or_open_file(data: bytes, limits: ImageLimits, recent: RecentPictures | None) -> Picture | OpenedImage:
    digest = file_digest(data, "upright" if limits.honour_exif else "as stored")
    found = None if recent is None else recent.find(crops_digest(digest, limits.max_crops))
    if found is not None:
        return found
    file = EncodedPicture(data, limits)
    opened = _opened(file, limits, file.format.bytes_per_pixel, file.load, digest)
    sent = SentFile(data, limits.honour_exif, limits.max_crops) if len(data) <= FEW_BYTES else None
    return replace(opened, file=sent)


def _read_file(source: str | os.PathLike[Any], limits: ImageLimits) -> bytes:
    path = os.path.expanduser(os.fsdecode(source))
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise RequestError("image", f"{shown!r} is {kind}; give the path of one picture")
        limits.check_bytes(status.st_size)
        with open(path, "rb") as file:
            return file.read(limits.max_bytes + 1)
    except RequestError:
        raise
    except FileNotFoundError as error:
        raise RequestError(
            "image", f"no file at {shown!r}; a str is a path here, pass encoded data as bytes"
        ) from error
    except OSError as error:
        raise RequestError("image", f"cannot read {shown!r} ({error.strerror}); give a readable file") from error
    except ValueError as error:
        raise RequestError("image", f"{shown!r} is not a path ({error}); pass encoded data as bytes") from error


_REMEDY = "pass uint8 [height, width, 3] RGB, [height, width, 4] RGBA, or [height, width] grey"


def _pixels_from_array(array: np.ndarray, limits: ImageLimits) -> np.ndarray:
    """[height, width, 3] uint8, possibly a view. Grey is repeated, alpha dropped, anything else refused by name."""
    if array.dtype != np.uint8:
        raise RequestError("image", f"an array of {array.dtype} is not supported; {_REMEDY}")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise RequestError("image", f"an array of shape {tuple(array.shape)} is not a picture; {_REMEDY}")
    limits.check_size(array.shape[0], array.shape[1])
    if array.ndim == 2 or array.shape[2] == 1:
        return np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    return array[:, :, :3]


_DIRECT = ("b-w", "srgb", "rgb", "multiband")


def _is_vips_image(source: object) -> bool:
    """Nobody can hold a pyvips image unless pyvips is loaded already."""
    pyvips = sys.modules.get("pyvips")
    return pyvips is not None and isinstance(source, pyvips.Image)


def _pixels_from_vips(image: Any, limits: ImageLimits) -> np.ndarray:
    """The pixels as they are (no rotation); other colour spaces and depths are brought to 8-bit sRGB by libvips."""
    limits.check_size(image.height, image.width)
    try:
        if image.format != "uchar" or image.interpretation not in _DIRECT:
            image = image.colourspace("srgb")
        pixel_bytes = image.write_to_memory()
    except sys.modules["pyvips"].Error as error:
        raise RequestError("image", f"pyvips could not read the picture ({error}); send a complete file") from error
    if image.format != "uchar":
        raise RequestError("image", f"pyvips pixels of format {image.format} are not supported; cast them to uchar")
    array = np.frombuffer(pixel_bytes, dtype=np.uint8).reshape(image.height, image.width, image.bands)
    return _pixels_from_array(array[:, :, :1] if image.bands == 2 else array, limits)


# ---------------------------------------------------------------------- files asked for lately


class SentFile(NamedTuple):
    """A small file, and what decoding it depends on. It is found again as it is: a digest takes four times as long."""

    data: bytes
    honour_exif: bool
    max_crops: int | None


@dataclass(slots=True)
class _Kept:
    file: SentFile | None
    picture: Future[Picture] = field(default_factory=Future)

    def bytes_with(self, picture: Picture) -> int:
        return picture.num_bytes + (0 if self.file is None else len(self.file.data))


class RecentPictures:
    """Many questions about one picture decode it once.

    For several threads: whoever asks for a file that another thread is decoding waits for that.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._digests: dict[int, dict[SentFile, str]] = {}
        """Of files, by length: one of another length need not be looked at to know that it is new."""

    def get(self, digest: str, decode: Callable[[], Picture], file: SentFile | None = None) -> Picture:
        """The picture with this digest; `decode` makes it. A failure is everyone's who waited, and is not kept."""
        own = _Kept(file)
        with self._lock:
            found = self._kept.setdefault(digest, own)
            self._kept.move_to_end(digest)
            if found is own and file is not None:
                self._digests.setdefault(len(file.data), {})[file] = digest
        if found is not own:
            return found.picture.result()
        try:
            picture = decode()
        except BaseException as error:
            with self._lock:
                self._drop(digest)
            own.picture.set_exception(error)
            raise
        with self._lock:
            self._make_room(digest, own.bytes_with(picture))
        own.picture.set_result(picture)
        return picture

    def find(self, digest: str) -> Picture | None:
        """The picture with this digest if it is here by now; never waits."""
        with self._lock:
            found = self._kept.get(digest)
            if found is None or not found.picture.done():
                return None
            self._kept.move_to_end(digest)
        return found.picture.result()

    def find_file(self, file: SentFile) -> Picture | None:
        """The same of a small file."""
        with self._lock:
            digest = self._digests.get(len(file.data), {}).get(file)
        return None if digest is None else self.find(digest)

    def _make_room(self, digest: str, num_bytes: int) -> None:
        """For a picture whose future is still open, so that nobody drives it out before it counts."""
        if num_bytes > self._max_bytes:
            self._drop(digest)
            return
        self._num_bytes += num_bytes
        for other in [other for other, kept in self._kept.items() if kept.picture.done()]:
            if self._num_bytes <= self._max_bytes:
                return
            dropped = self._drop(other)
            self._num_bytes -= dropped.bytes_with(dropped.picture.result())

    def _drop(self, digest: str) -> _Kept:
        kept = self._kept.pop(digest)
        if kept.file is not None:
            same_length = self._digests[len(kept.file.data)]
            del same_length[kept.file]
            if not same_length:
                del self._digests[len(kept.file.data)]
        return kept
