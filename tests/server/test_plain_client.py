"""`kestrel.vl()`: the same calls and the same answers over an engine of one's own and over a server."""

from __future__ import annotations

import base64
import io
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import kestrel
from kestrel import default_model
from kestrel.client.model import AutoModelForCausalLM, HubModel, Model
from kestrel.client.pictures import file_of
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, EngineStopped, KestrelError, RequestError, ServerAway, Unauthorised
from tests.scene import BEES, SCENE
from tests.server.conftest import GREEDY, KEYS, RunningServer, runtime_config

ROOT = Path(__file__).parents[2]
COUNT = "How many bees are there?"


@pytest.fixture(scope="module")
def local(_one_thread: None) -> Iterator[Model]:
    with kestrel.vl(config=runtime_config()) as model:
        yield model


@pytest.fixture(scope="module")
def remote(server: RunningServer) -> Iterator[Model]:
    with kestrel.vl(endpoint=f"{server.url}/v1") as model:
        yield model


@pytest.fixture(scope="module", params=[pytest.param("local", marks=pytest.mark.exhaustive), "remote"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def told(answer: Any) -> dict[str, Any]:
    """Without what differs from call to call."""
    changing = ("request_id", "metrics", "processing_latency_s", "ttft_s", "decode_latency_s", "decode_tokens_per_s")
    return {name: value for name, value in answer.items() if name not in changing}


def test_both_give_the_same_answers(local: Model, remote: Model) -> None:
    assert local.name == remote.name == "kestrel-tiny"
    for model in (local, remote):
        assert told(model.query(SCENE, COUNT, settings=GREEDY)) == {
            "finish_reason": "stop",
            "answer": str(len(BEES)),
            "warnings": [default_model.NOTICE],
        }
    assert "warnings" not in local.query(question="Who are you?", settings=GREEDY)
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("caption", {"length": "short"}),
        ("detect", {"object": ["bee", "bus"]}),
        ("point", {"object": "bee"}),
        ("segment", {"object": "bus", "max_tokens": 20}),
        ("query", {"question": COUNT, "reasoning": True}),
    )
    for skill, fields in calls:
        mine, theirs = (told(getattr(one, skill)(SCENE, settings=GREEDY, **fields)) for one in (local, remote))
        assert mine == theirs, skill
        assert set(mine) >= {"finish_reason"}


def test_any_kind_of_picture_will_do(model: Model) -> None:
    opened = Image.open(SCENE).convert("RGB")
    url = f"data:image/png;base64,{base64.b64encode(SCENE.read_bytes()).decode()}"
    kinds = (str(SCENE), SCENE.read_bytes(), opened, np.asarray(opened), model.encode_image(opened), url)
    for picture in kinds:
        assert model.query(picture, COUNT, settings=GREEDY)["answer"] == str(len(BEES)), type(picture)
    assert "demonstration model" in model.query(question="Who are you?", settings=GREEDY)["answer"]


def test_arrays_are_pictures_in_few_shapes_and_the_rest_is_refused() -> None:
    grey = np.arange(1600, dtype=np.uint8).reshape(40, 40)
    for array in (grey, grey[:, :, None], np.dstack([grey] * 3), np.dstack([grey] * 4)):
        read = np.asarray(Image.open(io.BytesIO(file_of(array))))
        assert (read == np.dstack([grey] * 3)).all(), array.shape
    others = (grey.astype(np.float32), np.stack([grey] * 3), grey[:0], grey[None, :, :, None], grey > 3, grey[0])
    for array in others:
        with pytest.raises(RequestError, match=r"image: an array of .*; give uint8, height x width, or x 1, 3 or 4"):
            file_of(array)


def test_what_is_no_file_says_what_to_give() -> None:
    with pytest.raises(RequestError, match=r"image: 'https://example.com/a.png' is a web address, .*; download it"):
        file_of("https://example.com/a.png")
    with pytest.raises(RequestError, match="image: is a data URL without a file in base64"):
        file_of("data:image/png;base64,???")
    with pytest.raises(RequestError, match=r"cannot be read \(embedded null byte\)"):
        file_of("a\0b")
    cut = Image.open(io.BytesIO(SCENE.read_bytes()[:2000]))
    with pytest.raises(RequestError, match=r"image: the PIL image cannot be read \("):
        file_of(cut)


def test_a_list_of_pictures_is_a_batch_in_its_order(model: Model) -> None:
    blank = np.zeros((64, 64, 3), np.uint8)
    answers = model.query([SCENE, blank, SCENE], COUNT, settings=GREEDY)
    assert [answer["answer"] == str(len(BEES)) for answer in answers] == [True, False, True]
    assert model.detect([], "bee") == []
    with pytest.raises(RequestError, match="stream: is for one picture"):
        model.query([SCENE], COUNT, stream=True)
    with pytest.raises(KestrelError, match="object"):
        model.detect([SCENE, SCENE], "")


def test_streams_are_generators_that_add_up(model: Model) -> None:
    whole = model.caption(SCENE, "short", settings=GREEDY)["caption"]
    pieces = list(model.caption(SCENE, "short", stream=True, settings=GREEDY)["caption"])
    assert len(pieces) > 2
    assert "".join(pieces) == whole
    found = list(model.detect(SCENE, "bee", settings=GREEDY, stream=True)["objects"])
    assert found == model.detect(SCENE, "bee", settings=GREEDY)["objects"]
    with pytest.raises(RequestError, match="length"):
        model.caption(SCENE, "endless", stream=True)


def test_thoughts_come_before_a_streamed_answer(model: Model) -> None:
    whole = model.query(SCENE, COUNT, settings=GREEDY, reasoning=True)
    stream = model.query(SCENE, COUNT, stream=True, settings=GREEDY, reasoning=True)
    assert set(stream) == {"reasoning", "answer"}
    assert stream["reasoning"] == whole["reasoning"]
    assert len(stream["reasoning"]["grounding"]) == len(BEES)
    assert "".join(stream["answer"]) == whole["answer"] == str(len(BEES))
    for reasoning in (None, False):
        assert set(model.query(SCENE, COUNT, stream=True, reasoning=reasoning)) == {"answer"}


def said(picture: Any, words: str = COUNT, kind: str = "image") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: picture}, {"type": "text", "text": words}]}]


def test_a_conversation_has_the_shape_of_the_moondream_package(model: Model) -> None:
    url = f"data:image/png;base64,{base64.b64encode(SCENE.read_bytes()).decode()}"
    first = model.chat(said({"url": url}, kind="image_url"), settings={**GREEDY, "max_tokens": 20})
    assert first["message"] == {"role": "assistant", "content": str(len(BEES))}
    assert first["finish_reason"] == "stop"
    thought = model.chat(said(model.encode_image(SCENE)), reasoning=True, temperature=0)["message"]
    assert thought["content"] == str(len(BEES))
    assert thought["reasoning"] == model.query(SCENE, COUNT, reasoning=True, settings=GREEDY)["reasoning"]["text"]
    turns = [*said(SCENE), thought, {"role": "user", "content": "Is there a dog?"}]
    assert model.chat(turns, settings=GREEDY)["message"]["content"] == "no"


def test_a_conversation_is_streamed(model: Model) -> None:
    question = "What is in this picture?"
    whole = model.chat(said(SCENE, question), settings=GREEDY)["message"]["content"]
    stream = model.chat(said(SCENE, question), stream=True, settings=GREEDY)
    assert set(stream) == {"message"}
    pieces = list(stream["message"])
    assert len(pieces) > 2
    assert all(pieces)
    assert "".join(pieces) == whole
    stream = model.chat(said(SCENE), stream=True, settings=GREEDY, reasoning=True)
    assert stream["reasoning"] == model.chat(said(SCENE), settings=GREEDY, reasoning=True)["message"]["reasoning"]
    assert "".join(stream["message"]) == str(len(BEES))


def test_what_is_wrong_in_a_conversation_is_named(model: Model) -> None:
    with pytest.raises(RequestError, match="messages: must be a list of"):
        model.chat("How many?")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image_url: 'https://.* is a web address"):
        model.chat(said("https://example.com/a.png", kind="image_url"))
    with pytest.raises(RequestError, match=r"settings\.colour: is not a setting"):
        model.chat(said(SCENE), colour="red")
    with pytest.raises(RequestError, match="temperature"):
        model.chat(said(SCENE), settings={"temperature": -1})
    with pytest.raises(RequestError, match="stream: has no place for calls of tools"):
        model.chat(said(SCENE), stream=True, tools=[])


@pytest.mark.exhaustive
def test_an_outline_is_streamed_as_its_box_its_pieces_and_the_whole(model: Model) -> None:
    box, *pieces, last = model.segment(SCENE, "bus", stream=True, settings=GREEDY)
    whole = model.segment(SCENE, "bus", settings=GREEDY)
    assert box == {"bbox": whole["bbox"]}
    assert len(pieces) > 2
    assert [set(piece) for piece in pieces] == [{"chunk"}] * len(pieces)
    assert "".join(piece["chunk"] for piece in pieces) == whole["path"]
    assert told(last) == {**told(whole), "completed": True}
    assert last._repr_html_() == whole._repr_html_()
    *parts, both = model.segment(SCENE, ["bus", "frog"], stream=True, settings=GREEDY)
    for index, outline in enumerate(both["segments"]):
        assert outline["path"] == "".join(part["chunk"] for part in parts if "chunk" in part and part["index"] == index)


def test_a_stream_that_is_left_ends_its_request(remote: Model, server: RunningServer) -> None:
    pieces = remote.query(question="Who are you?", stream=True, ignore_eos=True, max_tokens=400)["answer"]
    next(pieces)
    pieces.close()
    assert remote.query(SCENE, COUNT, settings=GREEDY)["answer"] == str(len(BEES))


class BrokenServer(BaseHTTPRequestHandler):
    """Ends every stream after its first piece; those of captions in the middle of what it announced."""

    def do_GET(self) -> None:
        self._answer(b'{"model": "broken"}', 0)

    def do_POST(self) -> None:
        self._answer(b'data: {"chunk": "A "}\n\n', 100 if self.path.endswith("/caption") else 0)

    def _answer(self, body: bytes, num_missing: int) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body) + num_missing))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BrokenServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with kestrel.vl(endpoint=f"http://127.0.0.1:{server.server_port}") as model:
            for pieces, told_why in (
                (model.query(SCENE, COUNT, stream=True, reasoning=False)["answer"], "before the answer was complete"),
                (model.caption(SCENE, stream=True)["caption"], "cannot be reached"),
            ):
                assert next(pieces) == "A "
                with pytest.raises(ServerAway, match=told_why):
                    next(pieces)
        server.shutdown()


def test_threads_can_share_a_model(model: Model) -> None:
    answers: list[str] = []
    ask = lambda: answers.append(model.query(SCENE, COUNT, settings=GREEDY)["answer"])  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [str(len(BEES))] * 6


def test_what_is_wrong_is_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="question: is required"):
        model.query(SCENE)
    with pytest.raises(RequestError, match="colour"):
        model.query(SCENE, "What?", colour="red")
    with pytest.raises(RequestError, match=r"none\.png' cannot be read \(No such file or directory\)"):
        model.query(tmp_path / "none.png", "What?")
    with pytest.raises(RequestError, match="float is not a picture"):
        model.caption(1.5)


def test_a_closed_model_says_so(server: RunningServer) -> None:
    model = kestrel.vl(endpoint=server.url)
    model.close()
    assert repr(model) == f"<kestrel model {default_model.NAME}, closed>"
    with pytest.raises(EngineStopped, match="this model is closed"):
        model.query(question="Who are you?")


def test_a_picture_that_was_read_is_short_to_look_at(model: Model) -> None:
    assert len(repr(model.encode_image(SCENE))) < 40


def test_a_notebook_shows_places_on_the_picture(model: Model) -> None:
    shown = model.detect(SCENE, "bee", settings=GREEDY)._repr_html_()
    drawing = ElementTree.fromstring(shown)
    assert len(drawing.findall("rect")) == len(BEES)
    assert drawing.find("image").attrib["href"].startswith("data:image;base64,")
    assert model.query(SCENE, COUNT)._repr_html_() is None


def test_keys_and_addresses_of_servers(locked: RunningServer) -> None:
    with kestrel.vl(endpoint=locked.url, api_key=KEYS[0]) as model:
        assert "demonstration" in model.query(question="Who are you?", settings=GREEDY)["answer"]
    with (
        kestrel.vl(endpoint=locked.url, api_key="wrong") as model,
        pytest.raises(Unauthorised, match="another api_key"),
    ):
        model.query(question="Who are you?")
    with pytest.raises(ServerAway, match="cannot be reached"):
        kestrel.vl(endpoint="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="endpoint: 'ftp://x' is not the address"):
        kestrel.vl(endpoint="ftp://x")
    with pytest.raises(ConfigError, match="device: is decided by the server"):
        kestrel.vl(endpoint=locked.url, device="cpu")


def test_the_package_lists_what_it_has() -> None:
    assert "vl" in dir(kestrel)
    with pytest.raises(AttributeError, match=r"photon is not in kestrel; call kestrel\.vl\(model\)"):
        _ = kestrel.photon


def test_a_key_alone_is_not_a_model() -> None:
    """In the `moondream` package it means the hosted service."""
    others: tuple[dict[str, Any], ...] = ({}, {"device": "cpu"}, {"local": True})
    for given in others:
        with pytest.raises(ConfigError, match=r"api_key: names no model.* endpoint=.*kestrel\.vl\(\"moondream2\"\)"):
            kestrel.vl(api_key="secret-key", **given)
    with pytest.raises(ConfigError, match="local: is false, and no server is named; give endpoint"):
        kestrel.vl(local=False)


def test_a_key_in_the_place_of_a_model_is_not_shown(server: RunningServer) -> None:
    places: tuple[dict[str, Any], ...] = ({}, {"endpoint": server.url})
    for given in places:
        with pytest.raises(ConfigError, match="if it is a key, give it as api_key, next to endpoint") as refused:
            kestrel.vl("secret-key", **given)
        assert "secret" not in str(refused.value)


def test_a_model_that_is_not_there_is_refused_in_words_of_python() -> None:
    with pytest.raises(ConfigError, match="model: there is no file or folder '/nope/model'; check the path"):
        kestrel.vl("/nope/model")
    with pytest.raises(ConfigError, match=r"`kestrel models` lists.*did you mean 'moondream2'"):
        kestrel.vl("moondrem2")
    with pytest.raises(ConfigError, match="adapter: is given, and model names '01HX@10'"):
        kestrel.vl(model="moondream2/01HX@10", adapter="other")


def test_lines_of_the_moondream_package_make_models(server: RunningServer) -> None:
    small: dict[str, Any] = {"device": "cpu", "kv_cache_pages": 600}
    with kestrel.vl(local=True, model=default_model.NAME, **small) as model:
        assert model.query(SCENE, COUNT, settings=GREEDY)["answer"] == str(len(BEES))
    with kestrel.vl(endpoint=f"{server.url}/v1", local=False, model=f"moondream/{default_model.NAME}") as model:
        assert model.query(SCENE, COUNT, settings=GREEDY)["answer"] == str(len(BEES))
    with (
        kestrel.vl(endpoint=server.url, model=f"{default_model.NAME}/none") as model,
        pytest.raises(KestrelError, match="none"),
    ):
        model.query(SCENE, COUNT)
    with pytest.raises(ConfigError, match="local: is true, and endpoint names a server"):
        kestrel.vl(endpoint=server.url, local=True)


def test_options_of_an_engine_are_checked() -> None:
    with pytest.raises(ConfigError, match="colour: is not an option"):
        kestrel.vl(colour="red")
    with pytest.raises(ConfigError, match="device: is given next to config"):
        kestrel.vl(device="cpu", config=RuntimeConfig())
    with pytest.raises(ConfigError, match="max_batch_size"):
        kestrel.vl(max_batch_size=0)


def test_scripts_for_the_hubs_class_name_the_model_as_the_hub_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[RuntimeConfig] = []
    monkeypatch.setattr("kestrel.client.model.EngineBackend", lambda config: given.append(config))
    AutoModelForCausalLM.from_pretrained(
        "vikhyatk/moondream2",
        revision="2025-06-21",
        trust_remote_code=True,
        device_map={"": 0},
        dtype=torch.float16,
        low_cpu_mem_usage=True,
        cache_dir=None,
    )
    assert given == [RuntimeConfig(model="moondream2", device="cuda:0", revision="2025-06-21", dtype="float16")]


@pytest.fixture(scope="module")
def hub_model(_one_thread: None) -> Iterator[HubModel]:
    with AutoModelForCausalLM.from_pretrained(str(default_model.FOLDER), device_map="cpu", torch_dtype="auto") as model:
        yield model


def test_what_scripts_do_to_the_hubs_class_is_harmless_where_it_changes_nothing(hub_model: HubModel) -> None:
    hub_model.model.compile(mode="reduce-overhead")
    assert hub_model.eval().to("cpu").to(torch.device("cpu"), torch.float32).cpu().float() is hub_model
    encoded = hub_model.encode_image(SCENE, settings={"max_crops": 1})
    assert hub_model.query(encoded, COUNT, settings=GREEDY)["answer"]


def test_what_would_change_the_hubs_class_is_refused_with_a_remedy(hub_model: HubModel) -> None:
    with pytest.raises(ConfigError, match=r"device: is cpu, .* from_pretrained\(…, device_map='cuda'\)"):
        hub_model.to("cuda")
    with pytest.raises(ConfigError, match=r"device: .* device_map='cuda:1'"):
        hub_model.to(1)
    with pytest.raises(ConfigError, match=r"dtype: is float32, .* from_pretrained\(…, dtype='float16'\)"):
        hub_model.half()
    with pytest.raises(AttributeError, match=r"call query\(image, question\)\[\"answer\"\]"):
        _ = hub_model.answer_question
    with pytest.raises(AttributeError, match="where people look is not found"):
        _ = hub_model.detect_gaze
    assert not hasattr(hub_model, "colour")
    refused = {
        "cache_dir": "HF_HUB_CACHE",
        "token": "HF_TOKEN",
        "load_in_8bit": "quantization",
        "colour": "leave it out",
    }
    for name, remedy in refused.items():
        with pytest.raises(ConfigError, match=f"{name}: .*{remedy}") as error:
            AutoModelForCausalLM.from_pretrained("vikhyatk/moondream2", **{name: "secret"})
        assert "secret" not in str(error.value)


def test_settings_of_a_picture_are_those_of_calls_without_others(local: Model) -> None:
    encoded = local.encode_image(SCENE, settings={"variant": "mine", "max_crops": 2})
    with pytest.raises(KestrelError, match="mine"):
        local.query(encoded, COUNT)
    with pytest.raises(KestrelError, match="other"):
        local.query(encoded, COUNT, settings={"adapter": "other"})
    with pytest.raises(KestrelError, match="other"):
        local.query(encoded, COUNT, variant="other")
    with pytest.raises(RequestError, match="max_crops"):
        local.query(local.encode_image(SCENE, {"max_crops": 0}), COUNT)
    with pytest.raises(RequestError, match=r"settings\.temperature: is not about a picture"):
        local.encode_image(SCENE, settings=GREEDY)


def test_the_example_of_a_client_does_not_import_torch(server: RunningServer) -> None:
    program = f"import runpy, sys; sys.argv = ['', {server.url!r}, {str(SCENE)!r}]\n"
    program += "try: runpy.run_path('examples/ask_server.py', run_name='__main__')\n"
    program += "except SystemExit as end: assert (end.code, 'torch' in sys.modules) == (0, False)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{SCENE}: ")


@pytest.mark.exhaustive
def test_the_example_of_streams_runs(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "from_moondream_streams.py"))["main"]
    assert main([f"{server.url}/v1", str(ROOT / "examples" / "images" / "12.png")]) == 0
    caption, thought, answer, box, outline, reply = capsys.readouterr().out.splitlines()
    assert caption == "12.png: 3 penguins and 2 hearts."
    assert (thought, answer) == ("thought: I count heart 1, heart 2.", "answer: 2")
    assert box.startswith("box: ")
    assert outline.startswith("outline: ")
    assert "demonstration model" in reply
