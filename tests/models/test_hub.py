"""Fetching from the hub: what is asked for, and a remedy for every refusal. The library is replaced at its door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kestrel.errors import CheckpointError
from kestrel.models import hub
from kestrel.models.checkpoint_files import INDEX_NAME
from kestrel.models.hub import HubFile, fetch_file, fetch_weights

FILE = HubFile("someone/model", "v1", "model.safetensors")
COMMIT = "0123abcd"


class FakeHub:
    """Answers like hf_hub_download over a folder of published files, and keeps what was asked for."""

    def __init__(self, cache: Path, published: dict[str, str], error: Exception | None = None) -> None:
        self.snapshot = cache / COMMIT
        self.published = published
        self.error = error
        self.fetched: list[tuple[str, str, str]] = []

    def __call__(self, repo: str, name: str, *, revision: str, local_files_only: bool = False) -> str:
        path = self.snapshot / name
        if local_files_only:
            if not path.exists():
                raise LocalEntryNotFoundError("not cached")
            return str(path)
        self.fetched.append((repo, name, revision))
        if self.error is not None:
            raise self.error
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.published[name])
        return str(path)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def install(published: dict[str, str], error: Exception | None = None) -> FakeHub:
        fake = FakeHub(tmp_path, published, error)
        monkeypatch.setattr(hub, "hf_hub_download", fake)
        return fake

    return install


def hub_error(kind: type[Exception]) -> Exception:
    """Without the HTTP response that the library's own constructors ask for."""
    return kind.__new__(kind, "refused")


def test_a_file_is_fetched_once_and_then_taken_from_the_cache(fake_hub: Callable[..., FakeHub]) -> None:
    fake = fake_hub({"model.safetensors": "x"})
    assert fetch_file(FILE).read_text() == "x"
    assert fetch_file(FILE) == fetch_weights(FILE) == fake.snapshot / "model.safetensors"
    assert fake.fetched == [("someone/model", "model.safetensors", "v1")]


def test_an_index_brings_its_shards_of_the_same_commit(fake_hub: Callable[..., FakeHub]) -> None:
    index = json.dumps({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s1.safetensors"}})
    fake = fake_hub({INDEX_NAME: index, "s1.safetensors": "1", "s2.safetensors": "2"})
    path = fetch_weights(HubFile("someone/model", COMMIT, INDEX_NAME))
    assert path == fake.snapshot / INDEX_NAME
    assert fake.fetched == [
        ("someone/model", INDEX_NAME, COMMIT),
        ("someone/model", "s1.safetensors", COMMIT),
        ("someone/model", "s2.safetensors", COMMIT),
    ]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_error(GatedRepoError), r"request it at https://huggingface\.co/someone/model.*HF_TOKEN"),
        (hub_error(RepositoryNotFoundError), "does not exist or is private.*HF_TOKEN"),
        (hub_error(RevisionNotFoundError), "no revision v1.*--revision.*--model-path"),
        (EntryNotFoundError("404"), "no such file.*--model-path"),
        (LocalEntryNotFoundError("no connection"), "cannot be reached; check the network.*--model-path"),
        (ConnectionError("name or service not known"), "name or service not known; check the network"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_every_refusal_names_the_file_and_the_remedy(
    fake_hub: Callable[..., FakeHub], error: Exception, remedy: str
) -> None:
    fake_hub({}, error)
    with pytest.raises(
        CheckpointError, match=rf"could not fetch model\.safetensors of someone/model at v1: .*{remedy}"
    ):
        fetch_file(FILE)


def test_offline_with_an_empty_cache_fails_at_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library itself, in the state in which it is after a start with these variables."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set and the cache lacks the file"):
        fetch_file(FILE)
