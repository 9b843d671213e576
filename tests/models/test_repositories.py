"""A text model by the name of its repository, against a small hub on the loopback, through huggingface_hub itself."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save

from kestrel import families, known_models
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError
from kestrel.llama import releases
from tests.llama.tiny_folders import write_folder
from tests.models.loopback_hub import NEW, OLD, OTHER, Hub

REPO = "someone/Tiny-1.5"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a repository holds that belongs to a model, and what does not."""
    folder = write_folder(tmp_path_factory.mktemp("published") / "tiny", "llama")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = {"generation_config.json": b"{}", "tokenizer_config.json": b"{}", "README.md": b"?", "code.py": b"!"}
    return found | others


def located(revision: str | None = None, **more: Any) -> families.LocatedModel:
    return families.resolve(RuntimeConfig(model=REPO, revision=revision, device="cpu", **more))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def sharded(files: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    (folder / WEIGHTS).write_bytes(files[WEIGHTS])
    tensors = load_file(folder / WEIGHTS)
    shards = {f"model-{n}-of-2.safetensors": sorted(tensors)[n::2] for n in range(2)}
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    parts = {shard: save({name: tensors[name] for name in names}) for shard, names in shards.items()}
    rest = {name: content for name, content in files.items() if name != WEIGHTS}
    return rest | parts | {"model.safetensors.index.json": json.dumps(index).encode()}


def test_a_repository_becomes_a_folder_of_the_cache_at_the_commit_of_main(
    hub: Hub, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.published[REPO] = files
    with caplog.at_level(logging.INFO, "kestrel.models"):
        found = located()
    assert f"main of {REPO} is commit {OLD}; a branch or tag may move, --revision {OLD} keeps" in caplog.text
    assert (found.name, found.family, found.weights.parent.name) == (REPO, "llama", OLD)
    assert names_in(found.weights.parent) == files.keys() - {"README.md", "code.py"}
    assert families.load(found, "cpu", torch.float32).name == REPO


def test_a_short_name_is_its_repository_filled_in(
    hub: Hub, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    short = known_models.short_names()["smollm2-135m"]
    hub.published[short.repo] = files
    with caplog.at_level(logging.INFO, "kestrel.models"):
        found = families.resolve(RuntimeConfig(model=short.name, device="cpu"))
    assert f"main of {short.repo} is commit {OLD}" in caplog.text
    by_its_own_name = families.resolve(RuntimeConfig(model=short.repo, device="cpu"))
    assert (found.name, found.weights) == (short.name, by_its_own_name.weights)
    assert families.resolve(RuntimeConfig(model=short.name, revision="v2")).weights.parent.name == OTHER
    assert families.find_repository(short.name).family == "llama"
    with pytest.raises(ConfigError, match=r"^model: is a repository of the hub, and model_path names files"):
        families.resolve(RuntimeConfig(model=short.name, model_path="/m"))
    hub.errors[short.repo] = (403, "GatedRepo")
    with pytest.raises(CheckpointError, match=rf"access is gated; request it at https://huggingface\.co/{short.repo},"):
        families.resolve(RuntimeConfig(model=short.name, revision=NEW))


def test_short_names_are_neither_repositories_nor_other_models() -> None:
    names = [*known_models.short_names(), *(spec.name for spec in known_models.known_models())]
    assert len(set(names)) == len(names)
    assert len(known_models.short_names()) == len(releases.SHORT_NAMES)
    assert not any("/" in name for name in names)
    with pytest.raises(ConfigError, match=r"^model: 'smollm2-135' is not .*did you mean 'smollm2-135m'"):
        families.resolve(RuntimeConfig(model="smollm2-135"))


def test_a_second_start_asks_for_the_commit_alone_and_one_without_the_hub_takes_the_last(
    hub: Hub, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.published[REPO] = files
    first = located()
    hub.asked.clear()
    assert located() == first
    assert hub.files_asked() == set(), "neither files that are there, nor those that the repository lacks"
    hub.is_down = True
    assert located() == first
    assert "the commit of main in the cache is used" in caplog.text
    hub.is_down = False
    hub.names["main"] = NEW
    assert located().weights.parent.name == NEW


def test_shards_come_with_their_index(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.published[REPO] = sharded(files, tmp_path)
    found = located()
    assert {"model-0-of-2.safetensors", "model-1-of-2.safetensors"} <= names_in(found.weights.parent)
    families.load(found, "cpu", torch.float32)


def test_a_tag_or_a_commit_may_be_named(hub: Hub, files: dict[str, bytes]) -> None:
    hub.published[REPO] = files
    assert located("v2").weights.parent.name == OTHER
    hub.asked.clear()
    assert located(NEW).weights.parent.name == NEW
    assert all(f"/resolve/{NEW}/" in path for path in hub.asked)
    with pytest.raises(CheckpointError, match=r"no revision v3; give another --revision"):
        located("v3")


def test_what_cannot_run_is_refused_before_its_weights_are_fetched(hub: Hub, files: dict[str, bytes]) -> None:
    config = json.loads(files["config.json"])
    for change, message in (
        (
            {"model_type": "gemma"},
            rf"config\.json of {REPO} at {OLD} describes no known .*'gemma'\); known are: moondream, llama, mistral",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ):
        hub.asked.clear()
        repo = f"someone/{'-'.join(change)}"
        hub.published[repo] = files | {"config.json": json.dumps(config | change).encode()}
        with pytest.raises(CheckpointError, match=message.replace(REPO, repo)):
            families.resolve(RuntimeConfig(model=repo))
        assert hub.files_asked() == {"config.json"}


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("config.json", r"could not fetch config\.json of .*has no such file; .*--model-path"),
        ("tokenizer.json", r"has no tokenizer\.json; save one with transformers .*--tokenizer-path"),
        (
            WEIGHTS,
            r"has no safetensors weights \(model\.safetensors or model\.safetensors\.index\.json\).*--model-path",
        ),
    ],
)
def test_what_a_repository_lacks_is_named(hub: Hub, files: dict[str, bytes], lacking: str, message: str) -> None:
    hub.published[REPO] = {name: content for name, content in files.items() if name != lacking}
    with pytest.raises(CheckpointError, match=message):
        located()
    assert lacking == WEIGHTS or WEIGHTS not in hub.files_asked()


def test_a_given_tokenizer_takes_the_place_of_the_repositorys(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_bytes(files["tokenizer.json"])
    hub.published[REPO] = {name: content for name, content in files.items() if name != "tokenizer.json"}
    assert located(tokenizer_path=tmp_path / "own.json").tokenizer == tmp_path / "own.json"


def test_repositories_that_are_closed_or_absent_say_what_to_do(hub: Hub, files: dict[str, bytes]) -> None:
    hub.errors |= {REPO: (404, "RepoNotFound"), "someone/gated": (403, "GatedRepo")}
    with pytest.raises(CheckpointError, match=rf"{REPO} does not exist or is private; .*hf auth login"):
        located()
    with pytest.raises(CheckpointError, match=r"access is gated; request it at"):
        families.resolve(RuntimeConfig(model="someone/gated"))
    del hub.errors[REPO]
    hub.published[REPO] = files
    located()
    hub.errors[REPO] = (404, "RepoNotFound")
    with pytest.raises(CheckpointError, match="does not exist or is private"):
        located()


def test_names_that_are_no_repository_are_refused_without_asking(hub: Hub) -> None:
    for name in ("./folder", "/models/tiny", "a/b/c", "../x", "org/", "org/a..b", "org/na me", "~/tiny", "o/x.git"):
        with pytest.raises(
            ConfigError, match=r"^model: .*is not the name of a repository \(org/name\); .*--model-path"
        ):
            families.resolve(RuntimeConfig(model=name))
    with pytest.raises(
        ConfigError, match=r"^model: 'tiny' is not a registered model; .*or name a repository .*org/name"
    ):
        families.resolve(RuntimeConfig(model="tiny"))
    with pytest.raises(ConfigError, match=r"^model: vikhyatk/moondream2 has the registered name moondream2"):
        families.resolve(RuntimeConfig(model="vikhyatk/moondream2"))
    with pytest.raises(ConfigError, match=r"^model: is a repository of the hub, and model_path names files"):
        families.resolve(RuntimeConfig(model=REPO, model_path="/m"))
    assert hub.asked == []


def test_files_that_nobody_can_ask_for_are_done_without(
    hub: Hub,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cache that another program filled does not know what the repository lacks."""
    hub.published[REPO] = files
    first = located()
    for absent in tmp_path.glob("cache/*/.no_exist"):
        shutil.rmtree(absent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert located() == first
    assert "could not fetch chat_template.jinja" in caplog.text
    assert "what the cache has is used" in caplog.text
    first.weights.unlink()
    with pytest.raises(CheckpointError, match=r"could not fetch model\.safetensors"):
        located()
