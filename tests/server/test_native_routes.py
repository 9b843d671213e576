"""Every native route, judged by the scene's truth or by the same call of the engine itself."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import httpx
import pytest
from PIL import ExifTags, Image

from kestrel.evals.metrics import box_iou
from tests.scene import BEES, SCENE
from tests.server.conftest import GREEDY, SCENE_BYTES, SCENE_URL, RunningServer, data_url

METRICS = {
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "prefill_time_ms",
    "decode_time_ms",
    "ttft_ms",
    "queue_time_ms",
}
TIMES = {"processing_latency_s", "ttft_s", "decode_latency_s", "decode_tokens_per_s"}
COMMON = {"request_id", "finish_reason", "metrics", "warnings"} | TIMES


def ask(client: httpx.Client, skill: str, **fields: Any) -> dict[str, Any]:
    response = client.post(f"/v1/{skill}", json=fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["request_id"] == response.headers["x-request-id"]
    assert answer["metrics"].keys() == METRICS
    assert all(answer[name] >= 0 for name in TIMES)
    return answer


def test_query_counts_what_is_in_the_picture(client: httpx.Client) -> None:
    answer = ask(client, "query", question="How many bees are there?", image_url=SCENE_URL, settings=GREEDY)
    assert answer["answer"] == str(len(BEES))
    assert answer["finish_reason"] == "stop"
    assert answer.keys() == COMMON | {"answer"}
    assert answer["metrics"]["input_tokens"] > 700
    assert answer["ttft_s"] == pytest.approx(answer["metrics"]["ttft_ms"] / 1000)


def test_query_thinks_when_asked_and_says_where_it_looked(client: httpx.Client) -> None:
    fields = {"question": "How many bees are there?", "image_url": SCENE_URL, "settings": GREEDY}
    answer = ask(client, "query", **fields, reasoning=True)
    assert answer["answer"] == str(len(BEES))
    points = [point for ground in answer["reasoning"]["grounding"] for point in ground["points"]]
    assert len(points) == len(BEES)
    for x_min, y_min, x_max, y_max in BEES:
        assert any(x_min <= x <= x_max and y_min <= y <= y_max for x, y in points)


def test_query_works_without_a_picture(client: httpx.Client, server: RunningServer) -> None:
    answer = ask(client, "query", question="Who are you?", settings=GREEDY)
    direct = server.on_loop(lambda: server.engine.query(question="Who are you?", reasoning=False, **GREEDY))
    assert answer["answer"] == direct.text


@pytest.mark.parametrize("length", ["short", "normal"])
def test_caption_says_what_the_engine_says(client: httpx.Client, server: RunningServer, length: str) -> None:
    answer = ask(client, "caption", image_url=SCENE_URL, length=length, settings=GREEDY)
    direct = server.on_loop(lambda: server.engine.caption(SCENE, length, **GREEDY))
    assert answer["caption"] == direct.output["caption"]
    assert answer.keys() == COMMON | {"caption"}


def test_detect_boxes_the_cows(client: httpx.Client) -> None:
    answer = ask(client, "detect", image_url=SCENE_URL, object="bee")
    assert answer.keys() == COMMON | {"objects", "image"}
    found = [(b["x_min"], b["y_min"], b["x_max"], b["y_max"]) for b in answer["objects"]]
    assert len(found) == len(BEES)
    for truth in BEES:
        assert max(box_iou(box, truth) for box in found) > 0.7


def test_places_are_told_in_pixels_of_the_picture_as_it_came(client: httpx.Client) -> None:
    """Whose stored rows are its columns: turned by its orientation tag."""
    with Image.open(SCENE) as scene:
        stored = scene.resize((600, 200)).transpose(Image.Transpose.ROTATE_90)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        file = io.BytesIO()
        stored.save(file, "PNG", exif=exif)
    answer = ask(client, "detect", image_url=data_url(file.getvalue()), object=["bee", "cross"])
    assert answer["image"] == {"width": 600, "height": 200}
    assert answer["objects"]
    for box in answer["objects"]:
        lengths = {side: 600 if side.startswith("x") else 200 for side in box["pixels"]}
        inside = {side: min(max(box[side], 0.0), 1.0) * length for side, length in lengths.items()}
        assert box["pixels"] == pytest.approx(inside, abs=0.005)
        assert inside.keys() == {"x_min", "y_min", "x_max", "y_max"}


@pytest.mark.exhaustive
def test_several_objects_are_one_call(client: httpx.Client, server: RunningServer) -> None:
    names = ["bee", "dog", "cross"]
    alone = [ask(client, "detect", image_url=SCENE_URL, object=name)["objects"] for name in names]
    expected = [{**box, "label": name} for name, found in zip(names, alone, strict=True) for box in found]
    answer = ask(client, "detect", image_url=SCENE_URL, object=names)
    assert answer["objects"] == expected
    with client.stream("POST", "/v1/detect", json={"image_url": SCENE_URL, "object": names, "stream": True}) as events:
        data = [json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line]
    assert sorted((one["object"] for one in data[:-1]), key=str) == sorted(expected, key=str)
    assert (data[-1]["type"], data[-1]["objects"]) == ("final", expected)
    refused = client.post("/v1/detect", json={"image_url": SCENE_URL, "object": ["bee", "bee"], "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "object[1]")
    refused = client.post("/v1/segment", json={"image_url": SCENE_URL, "instances": "all"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "object")
    outlines = ask(client, "segment", image_url=SCENE_URL, object="bee", instances="all")["segments"]
    assert [one["score"] for one in outlines] == [box["score"] for box in alone[0]]
    assert server.engine.num_requests == 0


def test_point_points_where_the_engine_does_and_stops_at_max_points(
    client: httpx.Client, server: RunningServer
) -> None:
    direct = server.on_loop(lambda: server.engine.point(SCENE, "cross"))
    assert ask(client, "point", image_url=SCENE_URL, object="cross")["points"] == direct.output["points"]
    limited = ask(client, "point", image_url=SCENE_URL, object="cross", max_points=1)
    assert limited["points"] == direct.output["points"][:1]
    assert limited["finish_reason"] == "length"


def test_segment_outlines_what_the_engine_outlines(client: httpx.Client, server: RunningServer) -> None:
    answer = ask(client, "segment", image_url=SCENE_URL, object="red cross", settings=GREEDY)
    direct = server.on_loop(lambda: server.engine.segment(SCENE, "red cross", **GREEDY))
    assert answer.keys() == COMMON | {"path", "bbox", "pixels", "label", "score", "segments", "image"}
    assert (answer["path"], answer["bbox"]) == (direct.output["path"], direct.output["bbox"])
    assert answer["path"].startswith("M ")
    assert answer["segments"][0]["svg_path"] == answer["path"]
    assert answer["segments"][0]["bbox"] == answer["bbox"]


def test_spatial_references_reach_the_skill(client: httpx.Client, server: RunningServer) -> None:
    refs = [list(BEES[0])]
    fields = {"question": "What is this?", "image_url": SCENE_URL, "settings": GREEDY, "spatial_refs": refs}
    direct = server.on_loop(
        lambda: server.engine.query(SCENE, "What is this?", spatial_refs=refs, reasoning=False, **GREEDY)
    )
    answer = ask(client, "query", **fields)
    assert answer["answer"] == direct.text
    assert answer["metrics"]["input_tokens"] == direct.metrics.input_tokens


def test_the_picture_may_be_raw_base64_with_line_breaks(client: httpx.Client) -> None:
    raw = base64.encodebytes(SCENE_BYTES).decode()
    answer = ask(client, "query", question="Is there a dog?", image_url=raw, settings=GREEDY)
    assert answer["answer"] == "no"


def test_settings_work_in_both_places_and_a_seed_repeats_the_answer(client: httpx.Client) -> None:
    inside = ask(client, "caption", image_url=SCENE_URL, settings={"temperature": 1.0, "seed": 5, "max_tokens": 12})
    beside = ask(client, "caption", image_url=SCENE_URL, temperature=1.0, seed=5, max_new_tokens=12)
    assert inside["caption"] == beside["caption"]
    assert inside["metrics"]["output_tokens"] <= 12


def test_logprobs_come_back_when_asked_for(client: httpx.Client) -> None:
    settings = {**GREEDY, "logprobs": 2}
    answer = ask(client, "query", question="Is there a dog?", image_url=SCENE_URL, settings=settings)
    first = answer["logprobs"][0]
    assert first["token"] == "no"
    assert first["top"][0]["logprob"] == first["logprob"] <= 0.0


def test_null_means_not_given(client: httpx.Client) -> None:
    answer = ask(
        client, "query", question="Is there a dog?", image_url=SCENE_URL, settings=GREEDY, model=None, stream=None,
        reasoning=None, spatial_refs=None, adapter=None, priority=None, request_id=None,
    )  # fmt: skip
    assert answer["answer"] == "no"


@pytest.mark.parametrize("name", ["kestrel-tiny", "moondream/kestrel-tiny"])
def test_the_model_may_be_named(client: httpx.Client, name: str) -> None:
    assert ask(client, "query", question="Who are you?", model=name, max_tokens=1)["answer"]


def test_a_request_may_name_itself_and_its_urgency(client: httpx.Client, server: RunningServer) -> None:
    response = client.post(
        "/v1/query", json={"question": "Who are you?", "request_id": "mine", "priority": 3, "max_tokens": 1}
    )
    assert response.json()["request_id"] == "mine"
    assert "mine" in server.watcher.started_ids


def test_many_requests_at_once_answer_as_one_by_one(server: RunningServer) -> None:
    questions = ["How many bees are there?", "Is there a dog?", "Is there a bee?", "How many crosses are there?"] * 3

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            calls = [
                client.post("/v1/query", json={"question": q, "image_url": SCENE_URL, "settings": GREEDY})
                for q in questions
            ]
            return [response.json()["answer"] for response in await asyncio.gather(*calls)]

    together = asyncio.run(all_at_once())
    with server.client() as client:
        alone = [ask(client, "query", question=q, image_url=SCENE_URL, settings=GREEDY)["answer"] for q in questions]
    assert together == alone


def test_observers_hear_of_every_request_and_its_outcome(client: httpx.Client, server: RunningServer) -> None:
    answer = ask(client, "query", question="Who are you?", max_tokens=3)
    outcome = server.watcher.outcomes[answer["request_id"]]
    assert not isinstance(outcome, BaseException)
    assert outcome.metrics.output_tokens == answer["metrics"]["output_tokens"]
    refused = client.post("/v1/query", json={"question": "", "request_id": "refused"})
    assert refused.status_code == 400
    assert isinstance(server.watcher.outcomes["refused"], ValueError)
    assert server.state.running == {}
