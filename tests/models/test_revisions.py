"""Which commit runs: the pinned one, or the one that `revision` names.

Against a small hub on the loopback, through huggingface_hub itself.
"""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

from kestrel import families, known_models
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError
from kestrel.models.hub import HubFile, fetch_file, resolved
from tests.models.loopback_hub import NEW, OLD, OTHER, Hub

MODEL = HubFile("someone/model", "main", "model.safetensors")


def test_a_commit_is_never_looked_up(hub: Hub) -> None:
    pinned = HubFile(MODEL.repo, NEW, MODEL.name)
    assert resolved(pinned) == pinned
    assert hub.asked == []


def test_a_given_revision_is_looked_up_each_time_and_falls_back_to_the_cache(hub: Hub) -> None:
    assert fetch_file(resolved(MODEL)).read_text() == OLD
    hub.names["main"] = NEW
    assert resolved(MODEL).revision == NEW
    fetch_file(MODEL)
    hub.is_down = True
    assert resolved(MODEL).revision in (OLD, NEW)
    with pytest.raises(CheckpointError, match="could not fetch"):
        resolved(HubFile("someone/else", "main", "x"))


def test_revision_reaches_the_hub_and_an_unknown_one_is_named(hub: Hub) -> None:
    config = RuntimeConfig(model="moondream3.1-9B-A2B", revision="v2", tokenizer_path=__file__)
    assert families.resolve(config).weights.read_text() == OTHER
    with pytest.raises(CheckpointError, match=r"no revision v3; give another --revision"):
        families.resolve(RuntimeConfig(model="moondream3.1-9B-A2B", revision="v3"))


SOURCES = {spec.name: spec.source for spec in known_models.registered_models() if spec.source is not None}


@pytest.mark.parametrize("name", SOURCES)
def test_registered_models_are_fetched_by_commit_or_not_at_all(name: str, hub: Hub) -> None:
    source = SOURCES[name]
    assert source.tokenizer.is_pinned
    if source.weights.revision is not None:
        assert source.weights.is_pinned
        return
    with pytest.raises(ConfigError, match=rf"^revision: is needed for {name}: .*/commits and give it with --revision"):
        families.resolve(RuntimeConfig(model=name))
    assert hub.asked == []
    located = families.resolve(RuntimeConfig(model=name, revision=NEW, tokenizer_path=__file__))
    assert located.weights.read_text() == NEW
    assert all(f"/resolve/{NEW}/" in path for path in hub.asked)


@pytest.mark.parametrize(
    "fields", [{"revision": "v1", "model_path": "/m"}, {"revision": "../x"}, {"revision": ""}, {"revision": 3}]
)
def test_a_revision_that_cannot_be_used_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^revision: "):
        RuntimeConfig(**fields)  # type: ignore[arg-type]


def test_a_hub_that_is_tried_again_is_told_of_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.is_down = True
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(**{**vars(time), "sleep": lambda _: None}))
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with pytest.raises(CheckpointError, match="could not fetch"):
        fetch_file(HubFile("someone/model", NEW, "model.safetensors"))
    assert len(hub.asked) > 2
    assert caplog.messages == ["the model hub does not answer; trying again"]


def test_the_embedded_model_has_no_revision() -> None:
    with pytest.raises(ConfigError, match=r"^revision: kestrel-tiny comes with the package"):
        families.resolve(RuntimeConfig(revision="main"))
