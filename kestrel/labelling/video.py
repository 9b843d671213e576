"""Frames of a video as pictures, where PyAV is installed.

A video is decoded once, in order, while its items are taken; an item holds its frame as a JPEG file. Frames that were
labelled before are decoded and not encoded. Frames are counted as they are shown, timed as by a player, to which the
file begins at 0, and turned upright.

`every` takes one frame in so many, `fps` the first frame at or after each point of an even grid in time. `scenes` takes
the first frame and each that differs from the one before it by more than CUT, or, where the picture changes slowly,
from the last one taken by more than DRIFT: the mean difference of thumbnails of 32 x 32 pixels, of the whole range.

Frames are taken up to the first damage. An item after them says what it is, and when.
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg

from kestrel.errors import ConfigError
from kestrel.labelling.pictures import Bulk, Gathering, SourceOptions, stem_of, text
from kestrel.labelling.records import Frame, Item

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer

CUT, DRIFT = 0.12, 0.24
THUMBNAIL_PX = 32
QUALITY = 95
MICROSECONDS = 1_000_000
GRID_SLACK_S = 0.0005
"""Some containers round times to milliseconds."""
MISSING_S = 0.1
"""A video may end so much earlier than its header says, beside its longest frame: edits are rounded."""
REMEDY = "needs PyAV, which is not installed; run `pip install -e '.[video]'` in the checkout"


_LOADING = threading.Lock()


def require_av(path: str) -> None:
    if find_spec("av") is None:
        raise ConfigError("SOURCE", f"{text(path)} {REMEDY}")
    with _LOADING:  # its modules import each other in a circle: a second thread would meet half of one
        import_module("av.video.reformatter")


def video_parts(path: str, gathering: Gathering, label: str) -> Iterator[Bulk]:
    label = label or stem_of(path.rpartition("/")[2])
    number = partial(_estimate, path, gathering.options)
    yield Bulk(key=text(path), items=partial(_items, path, label), count=number, is_sorted=True)


def _items(path: str, label: str, gathering: Gathering) -> Iterator[Item]:
    video, choose = text(path), _choice(gathering.options)
    last: Frame | None = None
    try:
        require_av(path)
        pictures = _Pictures()
        for picture, last in _shown(path, video):
            if choose(picture, last, pictures):
                key = f"{video}#{last.index:06d}"
                file = gathering.claim(key, f"{label}/{last.index:06d}.jpg")
                if file is not None:
                    data = pictures.jpeg(picture)
                    yield Item(key=key, file=file, read=partial(bytes, data), frame=last)
    except (OSError, ValueError) as error:
        where = "cannot be read" if last is None else f"is damaged after frame {last.index} ({last.time_s:.2f} s)"
        yield from gathering.bad(f"{video}#damage", f"{label}/damage", f"{video} {where}: {error}")


def _estimate(path: str, options: SourceOptions) -> int | None:
    """How many frames will be taken, from the header; the header of a damaged video counts as one."""
    if options.scenes:
        return None
    try:
        with _opened(path) as container:
            stream = container.streams.video[0]
            duration_s = _declared_end_s(container) - float((stream.start_time or 0) * (stream.time_base or 0))
            num_frames = stream.frames or duration_s * float(stream.average_rate or 0)
    except (OSError, ValueError):
        return 1
    return max(1, math.ceil(num_frames / options.every if options.every else duration_s * (options.fps or 1)))


# ---------------------------------------------------------------------- decoding


@contextmanager
def _opened(path: str) -> Iterator[InputContainer]:
    require_av(path)
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise ValueError("it holds no video")
            yield container
    except FFmpegError as error:
        raise ValueError(error.strerror) from error


def _shown(path: str, video: str) -> Iterator[tuple[VideoFrame, Frame]]:
    """Frames in the order in which they are shown. Raises at the first damage, after the last good frame."""
    with _opened(path) as container:
        stream = container.streams.video[0]
        start_s = (container.start_time or 0) / MICROSECONDS
        index, time_s, longest_s = 0, 0.0, 0.0
        for picture in _decoded(container):
            before_s = time_s
            if picture.pts is not None and stream.time_base:
                time_s = float(picture.pts * stream.time_base) - start_s
            else:
                time_s = index / float(stream.average_rate or 25)
            longest_s = max(longest_s, time_s - before_s)
            yield picture, Frame(video, index, round(time_s, 6))
            index += 1
        declared_s = _declared_end_s(container) - start_s
        if index == 0:
            raise ValueError("no frame can be decoded")
        if declared_s - time_s > longest_s + MISSING_S:
            raise ValueError(f"it ends there, {declared_s:.2f} s are declared in its header")


def _decoded(container: InputContainer) -> Iterator[VideoFrame]:
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    stream.codec_context.options = {"err_detect": "explode"}  # rather an error than a repaired picture
    has_begun = False
    for packet in _packets(container):
        try:
            # At damage, what was decoded before it and waits for its turn to be shown is called for.
            pictures = stream.decode(None if isinstance(packet, str) else packet)
        except ValueError:
            if has_begun:
                raise
            continue  # a recording that begins between two whole pictures
        for picture in pictures:
            if picture.is_corrupt and has_begun:
                raise ValueError("a frame is incomplete")
            if not picture.is_corrupt:
                has_begun = True
                yield picture
        if isinstance(packet, str):
            raise ValueError(packet)


def _packets(container: InputContainer) -> Iterator[Packet | str]:
    """Whole ones; where one is damaged, why it is, as the last. A recording may begin within one."""
    has_begun = False
    try:
        for packet in container.demux(container.streams.video[0]):
            if packet.is_corrupt and has_begun:
                yield "the data is incomplete"
                return
            if not packet.is_corrupt:
                has_begun = True
                yield packet
    except (OSError, ValueError) as error:
        yield getattr(error, "strerror", None) or str(error)


def _declared_end_s(container: InputContainer) -> float:
    """Of the video's last frame, by the header; 0 where that does not tell."""
    stream = container.streams.video[0]
    if container.format.name == "avi" and stream.average_rate:
        return float(stream.frames / stream.average_rate)  # the duration is made to fit what is there of the file
    if stream.duration is not None and stream.time_base:
        return float((stream.duration + (stream.start_time or 0)) * stream.time_base)
    clock = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    return sum(float(part) * unit for part, unit in zip(clock.groups(), (3600, 60, 1), strict=True)) if clock else 0.0


# ---------------------------------------------------------------------- pictures


class _Pictures:
    """Of the frames of one video."""

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter  # noqa: PLC0415

        self._full, self._small = VideoReformatter(), VideoReformatter()

    def jpeg(self, picture: VideoFrame) -> bytes:
        pixels = self._full.reformat(picture, format="rgb24").to_ndarray()
        upright = np.ascontiguousarray(_upright(pixels, _display_matrix(picture)))
        return simplejpeg.encode_jpeg(upright, quality=QUALITY, colorsubsampling="444", fastdct=False)

    def thumbnail(self, picture: VideoFrame) -> np.ndarray:
        small = self._small.reformat(picture, THUMBNAIL_PX, THUMBNAIL_PX, "rgb24", interpolation="AREA")
        return small.to_ndarray().astype(np.int16)


def _display_matrix(picture: VideoFrame) -> tuple[int, ...]:
    data = picture.side_data.get("DISPLAYMATRIX")
    return (1, 0, 0, 0, 1, 0, 0, 0, 1) if data is None else struct.unpack("=9i", bytes(data))


def _upright(pixels: np.ndarray, matrix: tuple[int, ...]) -> np.ndarray:
    """By quarter turns and mirrors. A point (x, y) is shown at (a x + c y, b x + d y)."""
    a, b, _, c, d = matrix[:5]
    if abs(b) > abs(a):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


# ---------------------------------------------------------------------- which frames

Choice = Callable[["VideoFrame", Frame, _Pictures], bool]


def _choice(options: SourceOptions) -> Choice:
    every = options.every
    if every is not None:
        return lambda picture, frame, pictures: frame.index % every == 0
    return _Scenes().takes if options.scenes else _Grid(options.fps or 1.0).takes


class _Grid:
    """The first frame at or after each point; none twice where frames are rarer than points."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._start_s: float | None = None
        self._next = 0

    def takes(self, picture: VideoFrame, frame: Frame, pictures: _Pictures) -> bool:
        if self._start_s is None:
            self._start_s = frame.time_s
        point = math.floor((frame.time_s - self._start_s + GRID_SLACK_S) * self._fps)
        if point < self._next:
            return False
        self._next = point + 1
        return True


class _Scenes:
    def __init__(self) -> None:
        self._before: np.ndarray | None = None
        self._taken: np.ndarray | None = None

    def takes(self, picture: VideoFrame, frame: Frame, pictures: _Pictures) -> bool:
        now = pictures.thumbnail(picture)
        is_new = _difference(now, self._before) > CUT or _difference(now, self._taken) > DRIFT
        self._before = now
        if is_new:
            self._taken = now
        return is_new


def _difference(now: np.ndarray, other: np.ndarray | None) -> float:
    return 1.0 if other is None else float(np.abs(now - other).mean()) / 255
