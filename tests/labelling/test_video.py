"""Frames of a video: the right ones, at the right times, decoded once, up to the first damage."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from kestrel.errors import ConfigError
from kestrel.labelling import sources, video
from kestrel.labelling.records import Frame, Item
from kestrel.labelling.sources import SourceOptions, count, items
from tests.labelling.test_sources import reason
from tests.labelling.videos import write_video
from tests.scene import turned_scenes

pytest.importorskip("av")

HEIGHT, WIDTH = 64, 128
BITS = 7


def numbered(index: int) -> np.ndarray:
    """A picture that says its number, as dark and light bars; the rest moves, so that frames depend on each other."""
    pixels = np.random.default_rng(index).integers(90, 160, (HEIGHT, WIDTH, 3), np.uint8)
    for bit in range(BITS):
        pixels[:32, bit * 18 : bit * 18 + 18] = 240 if index >> bit & 1 else 15
    return pixels


def number_in(item: Item) -> int:
    pixels = np.asarray(Image.open(io.BytesIO(item.read())))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    return sum((pixels[8:24, bit * 18 + 4 : bit * 18 + 14].mean() > 127) << bit for bit in range(BITS))


def clip(path: Path, num_frames: int = 60, start_ms: int = 0, codec: str = "libx264") -> Path:
    return write_video(path, ((start_ms + 40 * index, numbered(index)) for index in range(num_frames)), codec)


def seen(path: Path, options: SourceOptions | None = None) -> list[tuple[int, float]]:
    """The frames that were taken; each shows the number that it has."""
    found = list(items(path, options))
    frames = [item.frame for item in found if item.frame is not None]
    assert len(frames) == len(found)
    assert [number_in(item) for item in found] == [frame.index for frame in frames]
    assert [item.key for item in found] == [f"{path}#{frame.index:06d}" for frame in frames]
    assert {frame.video for frame in frames} == {str(path)}
    return [(frame.index, frame.time_s) for frame in frames]


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.MKV", "libx264"), ("a.avi", "mpeg4")])
def test_frames_are_taken_by_count_or_by_time(tmp_path: Path, name: str, codec: str) -> None:
    path = clip(tmp_path / name, codec=codec)
    assert seen(path) == [(0, 0.0), (25, 1.0), (50, 2.0)]
    assert seen(path, SourceOptions(every=17)) == [(0, 0.0), (17, 0.68), (34, 1.36), (51, 2.04)]
    assert seen(path, SourceOptions(fps=4)) == [
        (index, round(index * 0.04, 6)) for index in (0, 7, 13, 19, 25, 32, 38, 44, 50, 57)
    ]
    assert count(path) == 3
    assert count(path, SourceOptions(fps=4)) == 10
    assert [item.file for item in items(path)] == ["a/000000.jpg", "a/000025.jpg", "a/000050.jpg"]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_times_are_those_of_a_player_when_frames_come_unevenly_and_late(tmp_path: Path, name: str) -> None:
    times_ms = [5000, 5040, 5400, 5410, 5990, 6000, 8100, 8140, 8999, 9000]
    path = write_video(tmp_path / name, ((time, numbered(index)) for index, time in enumerate(times_ms)))
    shown = [(index, round((time - 5000) / 1000, 6)) for index, time in enumerate(times_ms)]
    assert seen(path, SourceOptions(every=1)) == shown
    # The points after 6.0 s fall into a gap: the next frame stands for all of them.
    assert [index for index, _ in seen(path, SourceOptions(fps=1))] == [0, 5, 6, 9]


def test_scenes_begin_where_the_picture_changes_and_fades_are_followed(tmp_path: Path) -> None:
    scenes = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB").resize((128, 128))) for png in turned_scenes()[:3]]
    dark = np.zeros_like(scenes[0])

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        for index in range(30):
            yield index * 40, np.roll(scenes[index // 10], index % 10, axis=1)  # the camera moves
        for index in range(30, 60):
            yield index * 40, (scenes[2] * (1 - (index - 30) / 30) + dark).astype(np.uint8)

    path = write_video(tmp_path / "a.mp4", frames())
    found = list(items(path, SourceOptions(scenes=True)))
    indices = [item.frame.index for item in found if item.frame is not None]
    assert indices[:3] == [0, 10, 20]
    assert len(indices) in (4, 5)
    for item, scene in zip(found, scenes, strict=False):
        assert np.abs(np.asarray(Image.open(io.BytesIO(item.read()))).astype(int) - scene).mean() < 8
    assert count(path, SourceOptions(scenes=True)) is None


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((0, 1, -1, 0), Image.Transpose.ROTATE_270),  # a phone held upright: a quarter turn clockwise
        ((0, -1, 1, 0), Image.Transpose.ROTATE_90),
        ((-1, 0, 0, -1), Image.Transpose.ROTATE_180),
        ((-1, 0, 0, 1), Image.Transpose.FLIP_LEFT_RIGHT),
        ((1, 0, 0, -1), Image.Transpose.FLIP_TOP_BOTTOM),
    ],
)
def test_frames_are_turned_upright(tmp_path: Path, matrix: tuple[int, ...], turn: Image.Transpose) -> None:
    path = clip(tmp_path / "a.mp4", 2)
    data = bytearray(path.read_bytes())
    a, b, c, d = (65536 * part for part in matrix)
    struct.pack_into(">5i", data, data.index(b"tkhd") + 44, a, b, 0, c, d)
    path.write_bytes(data)
    (item,) = items(path)
    expected = np.asarray(Image.fromarray(numbered(0)).transpose(turn))
    assert np.abs(np.asarray(Image.open(io.BytesIO(item.read()))).astype(int) - expected).mean() < 25


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_video_that_is_cut_off_is_read_up_to_there_and_says_so(tmp_path: Path, name: str, share: float) -> None:
    path = clip(tmp_path / name, codec="mpeg4" if name == "a.avi" else "libx264")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    *good, bad = items(path, SourceOptions(every=1))
    indices = [item.frame.index for item in good if item.frame is not None]
    assert indices == list(range(len(good)))
    assert 60 * share - 10 < len(good) < 60 * share + 10
    assert [number_in(item) for item in good] == indices
    assert f"{path} is damaged after frame {indices[-1]} ({indices[-1] * 0.04:.2f} s): " in reason(bad)
    assert (bad.key, bad.file) == (f"{path}#damage", "a/damage")


def test_a_damaged_stretch_ends_a_video_before_wrong_frames(tmp_path: Path) -> None:
    path = clip(tmp_path / "a.mkv")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = b"\xff" * 3000
    path.write_bytes(data)
    *good, bad = items(path, SourceOptions(every=1))
    assert [number_in(item) for item in good] == list(range(len(good)))
    assert 20 < len(good) < 33
    assert "is damaged after frame" in reason(bad)


def test_a_recording_that_begins_between_two_whole_pictures_is_read_from_the_first_one_on(tmp_path: Path) -> None:
    path = clip(tmp_path / "a.m2ts")
    path.write_bytes(path.read_bytes()[188 * 200 :])
    found = list(items(path, SourceOptions(every=1)))
    first = number_in(found[0])
    assert 0 < first <= 24
    assert [number_in(item) for item in found] == list(range(first, 60))
    assert [item.frame.index for item in found if item.frame is not None] == list(range(60 - first))


def test_what_is_no_video_is_one_item_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video" * 100)
    (tmp_path / "b.mov").write_bytes(b"")
    (tmp_path / "c.mp4").write_bytes(clip(tmp_path / "whole.mkv", 5).read_bytes()[:300])
    (tmp_path / "whole.mkv").unlink()
    found = list(items(tmp_path))
    assert [item.file for item in found] == ["a/damage", "b/damage", "c/damage"]
    assert all(f"{tmp_path}/" in reason(item) and "cannot be read: " in reason(item) for item in found)
    assert count(tmp_path) == 3


def test_frames_that_are_done_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = clip(tmp_path / "a.mp4")
    whole = list(items(path, SourceOptions(every=10)))
    encoded: list[int] = []
    encode = simplejpeg.encode_jpeg
    monkeypatch.setattr(video.simplejpeg, "encode_jpeg", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    done = {item.key for item in whole[:4]}
    rest = list(items(path, SourceOptions(every=10), done))
    assert rest == whole[4:]
    assert [item.read() for item in reversed(rest)] == [item.read() for item in reversed(whole[4:])]
    assert len(encoded) == 2


def test_videos_in_folders_and_lists_come_with_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "day").mkdir()
    clip(tmp_path / "day/clip.mp4", 2)
    (tmp_path / "day/b.png").write_bytes(turned_scenes()[0])
    (tmp_path / "list.txt").write_text("day/clip.mp4\n")
    assert [item.file for item in items(tmp_path / "day")] == ["b.png", "clip/000000.jpg"]
    assert [item.file for item in items(tmp_path / "list.txt")] == ["day/clip/000000.jpg"]
    assert count(tmp_path) == 2


def test_without_pyav_a_video_is_refused_and_one_in_a_folder_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"SOURCE: .*a\.mp4 needs PyAV.*pip install -e '\.\[video\]'"):
        sources.items(tmp_path / "a.mp4")
    (item,) = sources.items(tmp_path)
    assert "needs PyAV" in reason(item)


def test_a_frame_knows_where_it_is_from(tmp_path: Path) -> None:
    path = clip(tmp_path / "a.mp4", 30)
    assert [item.frame for item in items(path)] == [Frame(str(path), 0, 0.0), Frame(str(path), 25, 1.0)]
