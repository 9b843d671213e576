"""Pictures that are odd, damaged or meant to hurt: each works or is refused by name, and the server lives on."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from PIL import Image

from kestrel.server.config import ServerConfig
from tests.moondream.coarse import EMBEDDED, coarse_folder
from tests.server.conftest import SCENE_BYTES, data_url, encoded, runtime_config, start_server

QUESTION = {"question": "What is this?", "max_tokens": 1}
RGB = Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3))


@pytest.fixture(scope="module")
def quick_client(_one_thread: None) -> Iterator[httpx.Client]:
    """Of a server whose model has a coarse look: what a picture shows does not matter here, and each is a new one."""
    for server in start_server(ServerConfig(port=0), runtime_config(model_path=coarse_folder(EMBEDDED))):
        with server.client() as client:
            yield client


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def sixteen_bit_png() -> bytes:
    return encoded(Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16), "PNG")


ODD_BUT_FINE = {
    "1x1": encoded(Image.new("RGB", (1, 1), "red"), "PNG"),
    "1x2000": encoded(Image.new("RGB", (1, 2000), "red"), "PNG"),
    "animated gif": animated("GIF"),
    "animated webp": animated("WEBP"),
    "cmyk jpeg": encoded(RGB.convert("CMYK"), "JPEG"),
    "grey jpeg": encoded(RGB.convert("L"), "JPEG"),
    "palette png with transparency": encoded(RGB.convert("P"), "PNG", transparency=0),
    "rgba png": encoded(RGB.convert("RGBA"), "PNG"),
    "bilevel png": encoded(RGB.convert("1"), "PNG"),
    "16-bit png": sixteen_bit_png(),
    "bmp": encoded(RGB, "BMP"),
    "tiff": encoded(RGB, "TIFF"),
    "webp": encoded(RGB, "WEBP"),
}


@pytest.mark.parametrize("name", ODD_BUT_FINE)
def test_an_odd_picture_works(quick_client: httpx.Client, name: str) -> None:
    response = quick_client.post("/v1/query", json={**QUESTION, "image_url": data_url(ODD_BUT_FINE[name])})
    assert response.status_code == 200, response.text


def png_that_claims(width: int, height: int) -> bytes:
    """A few bytes whose header promises any number of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


SCENE_TEXT = base64.b64encode(SCENE_BYTES).decode()
HOSTILE = {
    "no picture": data_url(b"hello"),
    "empty data": "data:image/png;base64,",
    "empty text": "",
    "blanks": "   ",
    "base64 cut off": "data:image/png;base64," + SCENE_TEXT[:1001],
    "file cut off": "data:image/png;base64," + SCENE_TEXT[:1000],
    "jpeg cut off": data_url(encoded(RGB, "JPEG")[:200]),
    "not base64": "data:image/png;base64,%%%%",
    "not ascii": "data:image/png;base64,äöü",
    "no base64 marker": "data:image/png," + SCENE_TEXT,
    "no comma": "data:image/png;base64" + "A" * 50,
    "a zero byte": "\0",
    "pixel bomb": data_url(png_that_claims(60_000, 60_000)),
    "endless side": data_url(png_that_claims(2**31 - 1, 1)),
    "no pixels": data_url(png_that_claims(0, 10)),
    "svg": data_url(b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "image/svg+xml"),
    "eps": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "image/eps"),
    "gif header only": data_url(b"GIF89a"),
    "address of this machine": "http://127.0.0.1:22/",
    "address of the cloud": "http://169.254.169.254/latest/meta-data",
    "ftp": "ftp://example.com/a.png",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused_by_its_field(client: httpx.Client, name: str) -> None:
    response = client.post("/v1/query", json={**QUESTION, "image_url": HOSTILE[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "image_url"
    assert "0x7" not in error["message"]
    assert len(error["message"]) < 400


def test_the_server_still_answers_after_all_that(client: httpx.Client) -> None:
    assert client.get("/ready").status_code == 200
    buffer = io.BytesIO(SCENE_BYTES)
    assert client.post("/v1/query", json={**QUESTION, "image_url": data_url(buffer.read())}).status_code == 200


def test_random_bytes_never_hurt(client: httpx.Client) -> None:
    rng = np.random.default_rng(0)
    good = bytearray(encoded(RGB, "PNG"))
    for _ in range(15):
        broken = bytearray(good)
        for place in rng.integers(0, len(good), 4):
            broken[place] = rng.integers(0, 256)
        response = client.post("/v1/query", json={**QUESTION, "image_url": data_url(bytes(broken))})
        assert response.status_code in (200, 400), response.text
