"""Which files of a folder are taken, and shard indexes that lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import INDEX_NAME, find_weights, open_checkpoint


def make_shards(folder: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    save_file({"a": torch.zeros(1)}, folder / "s1.safetensors")
    save_file({"b": torch.ones(2)}, folder / "s2.safetensors")
    entries = {"a": "s1.safetensors", "b": "s2.safetensors"} if weight_map is None else weight_map
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict(entries)}))
    return folder


def touch(folder: Path, *names: str) -> None:
    for name in names:
        torch.save({}, folder / name) if name.endswith(".pt") else save_file({"a": torch.zeros(1)}, folder / name)


def test_model_safetensors_is_preferred_over_other_files(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "units.safetensors", "model.pt")
    assert find_weights(tmp_path).name == "model.safetensors"


def test_a_single_file_of_another_name_is_taken(tmp_path: Path) -> None:
    touch(tmp_path, "model_fp8.pt")
    assert find_weights(tmp_path).name == "model_fp8.pt"


def test_several_candidates_are_not_guessed_between(tmp_path: Path) -> None:
    touch(tmp_path, "x.safetensors", "y.pt")
    with pytest.raises(CheckpointError, match=r"several weights files \(x\.safetensors, y\.pt\).*model_path"):
        find_weights(tmp_path)


def test_missing_path_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no weights; it needs model\.safetensors, .* or \.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("via_index", [True, False])
def test_shards_read_as_one_checkpoint(tmp_path: Path, via_index: bool) -> None:
    folder = make_shards(tmp_path)
    with open_checkpoint(folder / INDEX_NAME if via_index else folder) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "b"]
        assert torch.equal(checkpoint.read("b"), torch.ones(2))
        assert torch.equal(checkpoint.read("a"), torch.zeros(1))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (make_shards(tmp_path) / "s2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"lacks s2\.safetensors, listed in {INDEX_NAME}"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"})
    with pytest.raises(CheckpointError, match=r"files lack: c \(in s2\.safetensors\)"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path)
    save_file({"b": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "s2.safetensors")
    with pytest.raises(CheckpointError, match=r"does not list .*extra \(in s2\.safetensors\)"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    make_shards(tmp_path, {"a": "../s1.safetensors"})
    with pytest.raises(CheckpointError, match="same folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["not json", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}.*download"):
        open_checkpoint(tmp_path)
