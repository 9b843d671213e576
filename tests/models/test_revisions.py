"""Which commit runs: the pinned one, the one a branch was at its first fetch, or the one that `revision` names.

Against a small hub on the loopback, through huggingface_hub itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from kestrel import families
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError
from kestrel.models.hub import RECORD_NAME, HubFile, fetch_file, resolved, settled

OLD, NEW, OTHER = "a" * 40, "b" * 40, "c" * 40
MODEL = HubFile("someone/model", "main", "model.safetensors")


@dataclass
class Hub:
    """Every file of every commit holds the commit's name."""

    names: dict[str, str] = field(default_factory=lambda: {"main": OLD, "v2": OTHER})
    asked: list[str] = field(default_factory=list)
    is_down: bool = False

    def commit(self, revision: str) -> str | None:
        return revision if revision in (OLD, NEW, OTHER) else self.names.get(revision)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            hub.asked.append(self.path)
            parts = self.path.split("?")[0].split("/")
            is_api = parts[1] == "api"
            commit = hub.commit(parts[6] if is_api else parts[4])
            if hub.is_down or commit is None:
                self.send_response(500 if hub.is_down else 404)
                self.send_header("X-Error-Code", "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = json.dumps({"id": "someone/model", "sha": commit, "siblings": []}) if is_api else commit
            self.send_response(200)
            self.send_header("ETag", f'"{commit}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_branch_that_moves_does_not_change_what_is_fetched(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kestrel.models")
    first = settled(MODEL)
    assert (first.revision, fetch_file(first).read_text()) == (OLD, OLD)
    assert OLD in caplog.text
    hub.names["main"] = NEW
    assert settled(MODEL).revision == OLD
    other_file = HubFile(MODEL.repo, "main", "second.safetensors")  # which no cache holds yet
    assert fetch_file(settled(other_file)).read_text() == OLD
    assert json.loads((tmp_path / RECORD_NAME).read_text()) == {"someone/model@main": OLD}


def test_the_record_outlives_the_cache_and_what_others_do_to_it(hub: Hub, tmp_path: Path) -> None:
    settled(MODEL)
    reference = tmp_path / "models--someone--model" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text(NEW)  # another program fetched the branch after it moved
    hub.names["main"] = NEW
    num_asked = len(hub.asked)
    assert settled(MODEL).revision == OLD
    assert len(hub.asked) == num_asked


def test_what_the_cache_holds_of_a_branch_decides_before_the_hub_does(hub: Hub, tmp_path: Path) -> None:
    fetch_file(MODEL)  # as earlier releases did
    hub.names["main"] = NEW
    assert settled(MODEL).revision == OLD


def test_a_commit_is_never_looked_up(hub: Hub, tmp_path: Path) -> None:
    pinned = HubFile(MODEL.repo, NEW, MODEL.name)
    assert settled(pinned) == resolved(pinned) == pinned
    assert hub.asked == []
    assert not (tmp_path / RECORD_NAME).exists()


def test_a_given_revision_is_looked_up_each_time_and_falls_back_to_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert fetch_file(resolved(MODEL)).read_text() == OLD
    hub.names["main"] = NEW
    assert resolved(MODEL).revision == NEW
    fetch_file(MODEL)
    hub.is_down = True
    assert resolved(MODEL).revision in (OLD, NEW)
    assert not (tmp_path / RECORD_NAME).exists()
    with pytest.raises(CheckpointError, match="could not fetch"):
        settled(HubFile("someone/else", "main", "x"))


def test_revision_reaches_the_hub_and_an_unknown_one_is_named(hub: Hub) -> None:
    config = RuntimeConfig(model="moondream3.1-9B-A2B", revision="v2", tokenizer_path=__file__)
    assert families.resolve(config).weights.read_text() == OTHER
    with pytest.raises(CheckpointError, match=r"no revision v3; give another --revision"):
        families.resolve(RuntimeConfig(model="moondream3.1-9B-A2B", revision="v3"))


def test_registered_models_are_fetched_by_commit(hub: Hub, tmp_path: Path) -> None:
    sources = {spec.name: spec.source for spec in families.registered_models() if spec.source is not None}
    movable = [name for name, source in sources.items() if not source.weights.is_pinned]
    assert movable == ["moondream3.1-9B-A2B"]
    assert all(source.tokenizer.is_pinned for source in sources.values())
    config = RuntimeConfig(model="moondream3.1-9B-A2B", tokenizer_path=__file__)
    assert families.resolve(config).weights.read_text() == OLD
    hub.names["main"] = NEW
    reference = tmp_path / "models--moondream--moondream3.1-9B-A2B" / "refs" / "main"
    reference.parent.mkdir(exist_ok=True)
    reference.write_text(NEW)  # as another program that follows the branch does
    assert families.resolve(config).weights.read_text() == OLD
    fetched = [path for path in hub.asked if "/resolve/" in path]
    assert fetched
    assert all(f"/resolve/{OLD}/" in path for path in fetched)


@pytest.mark.parametrize(
    "fields", [{"revision": "v1", "model_path": "/m"}, {"revision": "../x"}, {"revision": ""}, {"revision": 3}]
)
def test_a_revision_that_cannot_be_used_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^revision: "):
        RuntimeConfig(**fields)  # type: ignore[arg-type]


def test_the_embedded_model_has_no_revision() -> None:
    with pytest.raises(ConfigError, match=r"^revision: kestrel-tiny comes with the package"):
        families.resolve(RuntimeConfig(revision="main"))
