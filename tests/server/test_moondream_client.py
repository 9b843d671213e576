"""The hosted service's own Python client, unmodified, against this server."""

from __future__ import annotations

import base64
import re
import runpy
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kestrel
from kestrel.evals.metrics import box_iou
from tests.scene import BEES, SCENE
from tests.server.conftest import KEYS, RunningServer

MISSING = "the moondream client is not installed; run scripts/install-clients"
moondream = pytest.importorskip("moondream", reason=MISSING)
cloud_vl = pytest.importorskip("moondream.cloud_vl", reason=MISSING)

ROOT = Path(__file__).parents[2]
KEY = KEYS[0]
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def endpoint(locked: RunningServer) -> str:
    return f"{locked.url}/v1"


@pytest.fixture(scope="module")
def model(endpoint: str) -> Any:
    client = moondream.vl(endpoint=endpoint, api_key=KEY)
    assert isinstance(client, cloud_vl.CloudVL)
    return client


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.open(SCENE).convert("RGB")


def test_query(model: Any, picture: Image.Image) -> None:
    assert model.query(picture, "How many bees are there?", settings=GREEDY) == {"answer": str(len(BEES))}


def test_query_with_reasoning(model: Any, picture: Image.Image) -> None:
    result = model.query(picture, "How many bees are there?", reasoning=True, settings=GREEDY)
    assert result["answer"] == str(len(BEES))
    assert result["reasoning"]["text"]
    assert result["reasoning"]["grounding"][0].keys() == {"start_idx", "end_idx", "points"}


def test_query_without_a_picture(model: Any) -> None:
    assert "demonstration model" in model.query(question="Who are you?", settings=GREEDY)["answer"]


def test_streamed_query_and_caption_add_up(model: Any, picture: Image.Image) -> None:
    whole = model.caption(picture, "short", settings=GREEDY)["caption"]
    pieces = list(model.caption(picture, "short", stream=True, settings=GREEDY)["caption"])
    assert len(pieces) > 2
    assert "".join(pieces) == whole
    answer = model.query(picture, "Is there a dog?", stream=True, settings=GREEDY)["answer"]
    assert "".join(answer) == "no"
    thoughtful = model.query(picture, "How many bees are there?", stream=True, reasoning=True, settings=GREEDY)
    assert "".join(thoughtful["answer"]) == str(len(BEES))


def test_detect(model: Any, picture: Image.Image) -> None:
    boxes = model.detect(picture, "bee", settings={"max_objects": 20})["objects"]
    assert len(boxes) == len(BEES)
    for truth in BEES:
        assert max(box_iou((b["x_min"], b["y_min"], b["x_max"], b["y_max"]), truth) for b in boxes) > 0.6


def test_point(model: Any, picture: Image.Image) -> None:
    points = model.point(picture, "bee")["points"]
    assert len(points) == len(BEES)
    for x_min, y_min, x_max, y_max in BEES:
        assert any(x_min <= p["x"] <= x_max and y_min <= p["y"] <= y_max for p in points)


def test_segment_whole_and_streamed(model: Any, picture: Image.Image) -> None:
    whole = model.segment(picture, "red cross", settings=GREEDY)
    assert whole["path"].startswith("M ")
    assert whole["bbox"].keys() == {"x_min", "y_min", "x_max", "y_max"}
    updates = list(model.segment(picture, "red cross", stream=True, settings=GREEDY))
    assert updates[0] == {"bbox": whole["bbox"]}
    assert "".join(update["chunk"] for update in updates[1:-1]) == whole["path"]
    assert updates[-1] == {"path": whole["path"], "bbox": whole["bbox"], "completed": True}


def test_our_own_client_streams_outlines_in_the_same_shape(model: Any, picture: Image.Image, endpoint: str) -> None:
    encoded = model.encode_image(picture)
    theirs = list(model.segment(encoded, "red cross", stream=True, settings=GREEDY))
    file = base64.b64decode(encoded.image_url.partition(",")[2])
    with kestrel.vl(endpoint=endpoint, api_key=KEY) as own:
        *pieces, whole = own.segment(file, "red cross", stream=True, settings=GREEDY)
    assert [*pieces, {name: whole[name] for name in theirs[-1]}] == theirs


def test_a_script_prints_the_same_with_the_other_import_line(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples" / "from_moondream_streams.py"
    theirs = tmp_path / "script.py"
    theirs.write_text(script.read_text().replace("import kestrel as md", "import moondream as md"))
    printed: list[str] = []
    for path in (theirs, script):
        main = runpy.run_path(str(path))["main"]
        assert main([f"{server.url}/v1", str(ROOT / "examples" / "images" / "12.png")]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "3 penguins and 2 hearts" in printed[0]
    assert re.search(r"box: .*\noutline: [4-9] pieces, then \d curves", printed[0])


def test_spatial_references(model: Any, picture: Image.Image) -> None:
    result = model.query(picture, "What is this?", spatial_refs=[list(BEES[0])], settings=GREEDY)
    assert result["answer"]


@pytest.mark.parametrize(
    ("change", "status"),
    [({"api_key": None}, 401), ({"api_key": "wrong"}, 401), ({"model": "moondream9"}, 404)],
)
def test_refusals_reach_the_client_as_http_errors(endpoint: str, change: dict[str, str | None], status: int) -> None:
    client = moondream.vl(**{"endpoint": endpoint, "api_key": KEY, **change})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        client.query(question="Who are you?")
    with refusal.value as response:
        assert response.code == status


def test_a_bad_setting_is_a_400_in_a_stream_too(model: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        list(model.query(question="Who are you?", stream=True, settings={"temperature": -1})["answer"])
    with refusal.value as response:
        assert response.code == 400
        assert b"temperature" in response.read()


def test_the_model_may_be_named(endpoint: str) -> None:
    client = moondream.vl(endpoint=endpoint, api_key=KEY, model="kestrel-tiny")
    assert client.query(question="Who are you?", settings=GREEDY)["answer"]
