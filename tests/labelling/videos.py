"""Videos for tests, written by PyAV."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np


def write_video(
    path: Path, frames: Iterable[tuple[int, np.ndarray]], codec: str = "libx264", key_frames_every: int = 12
) -> Path:
    """Of (milliseconds, RGB pixels), in the order in which they are shown; with B-frames, in high quality."""
    import av  # noqa: PLC0415

    options = {"crf": "4", "preset": "veryfast", "bf": "2"} if codec == "libx264" else {"b": "4000000"}
    with av.open(str(path), "w", options={"movflags": "faststart"} if path.suffix == ".mp4" else {}) as container:
        stream = None
        for time_ms, pixels in frames:
            if stream is None:
                stream = container.add_stream(codec, rate=25, options=options)
                stream.height, stream.width = pixels.shape[:2]
                stream.pix_fmt, stream.gop_size = "yuv420p", key_frames_every
                stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        assert stream is not None
        container.mux(stream.encode(None))
    return path
