"""Adapter files that are wrong: each is refused with its name and everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kestrel.adapters import AdapterShape, load_adapter, save_adapter
from kestrel.adapters.adapter import Adapter, AdapterTarget, LowRankPair
from kestrel.errors import CheckpointError
from tests.adapters.adapter_files import HOSTED, MD2, MD3, VARIANT, hosted_tensors, variant_tensors

LAYER_1_FC1 = "text_model.transformer.h.1.mlp.fc1.parametrizations.weight.0."
DENSE = "text_lora.dense.0."
MOE = "text_lora.moe.1."


class Dangerous:
    """Leaves a trace when a loader runs pickled code."""

    ran = False

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (setattr, (Dangerous, "ran", True))


def refusal(path: Path, shape: AdapterShape) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(path, shape)
    assert str(path) in str(caught.value)
    return str(caught.value)


def refusal_of(tensors: dict[str, Tensor], folder: Path, shape: AdapterShape) -> str:
    save_file(tensors, folder / "bent.safetensors")
    return refusal(folder / "bent.safetensors", shape)


def test_missing_unexpected_misshapen_and_unusable_tensors_are_listed_together(tmp_path: Path) -> None:
    tensors = variant_tensors()
    del tensors[LAYER_1_FC1 + "A"]
    tensors["text_model.extra"] = torch.zeros(1)
    tensors[LAYER_1_FC1 + "B"] = torch.zeros(255, 4)
    tensors[LAYER_1_FC1.replace("h.1", "h.2") + "A"] = torch.zeros(4, 128, dtype=torch.int32)
    tensors[LAYER_1_FC1.replace("h.1", "h.0") + "A"][3, 5] = float("inf")
    message = refusal_of(tensors, tmp_path, MD2)
    assert f"missing tensors (1): {LAYER_1_FC1}A" in message
    assert "unexpected tensors (1): text_model.extra" in message
    assert f"wrong shapes at rank 4 (1): {LAYER_1_FC1}B is [255, 4], expected [256, 4]" in message
    assert "unusable tensors (2)" in message
    assert "h.2.mlp.fc1.parametrizations.weight.0.A is int32, expected plain floating-point numbers" in message
    assert "h.0.mlp.fc1.parametrizations.weight.0.A holds values that are not finite" in message


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused_in_experts(tmp_path: Path, value: float) -> None:
    tensors = hosted_tensors()
    tensors[MOE + "down_b"][7, 0, 1] = value
    assert "moe.1.down_b holds values that are not finite" in refusal_of(tensors, tmp_path, MD3)


def test_one_layer_of_another_rank_is_named(tmp_path: Path) -> None:
    tensors = variant_tensors()
    tensors |= {LAYER_1_FC1 + "A": torch.zeros(8, 128), LAYER_1_FC1 + "B": torch.zeros(256, 8)}
    message = refusal_of(tensors, tmp_path, MD2)
    assert f"wrong shapes at rank 4 (2): {LAYER_1_FC1}A is [8, 128], expected [4, 128]" in message


def test_experts_whose_share_does_not_add_up_to_the_rank_are_named(tmp_path: Path) -> None:
    tensors = hosted_tensors()
    tensors |= {MOE + "up_a": torch.zeros(8, 1, 128), MOE + "up_b": torch.zeros(8, 64, 1)}
    message = refusal_of(tensors, tmp_path, MD3)
    assert "wrong shapes at rank 6 (2): moe.1.up_a is [8, 1, 128], expected [8, 2, 128]" in message


def test_a_rank_that_the_experts_cannot_share_is_refused(tmp_path: Path) -> None:
    tensors = hosted_tensors()
    for part in ("up_a", "down_a"):
        tensors[DENSE + part] = torch.zeros(7, tensors[DENSE + part].shape[1])
    for part in ("up_b", "down_b"):
        tensors[DENSE + part] = torch.zeros(tensors[DENSE + part].shape[0], 7)
    assert "rank 7 is not a multiple of the 3 experts per token" in refusal_of(tensors, tmp_path, MD3)


def test_rank_zero_is_refused(tmp_path: Path) -> None:
    torch.save({k: v[:0] if k.endswith("A") else v[:, :0] for k, v in variant_tensors().items()}, tmp_path / "0.pt")
    assert "rank 0 is below 1" in refusal(tmp_path / "0.pt", MD2)


def test_an_adapter_of_another_model_is_refused() -> None:
    [layer, *_] = MD2.layers
    narrow = {**layer, "fc1": replace(layer["fc1"], columns=7)}
    assert "wrong shapes at rank 4" in refusal(VARIANT, replace(MD2, layers=(narrow,) * 3))
    assert "missing tensors (8)" in refusal(VARIANT, replace(MD2, layers=(layer,) * 4))
    assert "unexpected tensors (8)" in refusal(VARIANT, replace(MD2, layers=(layer,) * 2))
    assert "unexpected tensors (8)" in refusal(HOSTED, replace(MD2, layers=(layer,)))
    assert "adapts dense layers only" in refusal(VARIANT, MD3)


def test_the_parts_of_a_fine_tune_that_nothing_uses_are_refused(tmp_path: Path) -> None:
    tensors = hosted_tensors() | {"vision_lora.down": torch.zeros(6, 32)}
    assert "unexpected tensors (1): vision_lora.down" in refusal_of(tensors, tmp_path, MD3)


def test_a_fine_tune_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    other = hosted_tensors("_text.")
    other["_text.dense.0.up_a"][0, 0] += 1
    message = refusal_of(hosted_tensors() | other, tmp_path, MD3)
    assert "holds dense.0.up_a under two prefixes" in message


def test_a_long_list_is_cut_but_counted(tmp_path: Path) -> None:
    tensors = variant_tensors() | {f"extra.{index}": torch.zeros(1) for index in range(11)}
    message = refusal_of(tensors, tmp_path, MD2)
    assert "unexpected tensors (11): extra.0" in message
    assert message.endswith("and 3 more")


def test_tensors_of_no_known_format_are_refused(tmp_path: Path) -> None:
    assert "no known adapter format (its first tensor is weight)" in refusal_of(
        {"weight": torch.zeros(2)}, tmp_path, MD2
    )


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert "is not a file" in refusal(path, MD2)
    path.write_bytes(b"")
    assert "is empty" in refusal(path, MD2)
    if name.endswith(".pt"):
        torch.save(variant_tensors(), path)
    else:
        save_file(variant_tensors(), path)
    whole = path.read_bytes()
    for kept in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert re.search("truncated|damaged", refusal(path, MD2))


def test_a_torch_file_with_a_broken_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.pt"
    torch.save(variant_tensors(), path)
    content = path.read_bytes()
    start = content.index(b"data.pkl") + 200
    path.write_bytes(content[:start] + b"\xff" * 40 + content[start + 40 :])
    assert "damaged" in refusal(path, MD2)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"lora_state_dict": hosted_tensors(), "config": Dangerous()}, tmp_path / "code.pt")
    assert "never run" in refusal(tmp_path / "code.pt", MD3)
    assert not Dangerous.ran


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list"),
        ({}, "holds no tensors"),
        ({"lora_state_dict": {}}, "holds no tensors"),
        ({"lora_state_dict": [1]}, "holds a list under lora_state_dict"),
        ({"text_lora.dense.0.up_a": "text"}, "holds a str under 'text_lora.dense.0.up_a'"),
        ({7: torch.zeros(1)}, "holds a Tensor under 7"),
    ],
)
def test_torch_files_without_a_dictionary_of_tensors_are_refused(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "odd.pt")
    assert words in refusal(tmp_path / "odd.pt", MD3)


def test_tensors_without_plain_data_are_refused(tmp_path: Path) -> None:
    tensors = hosted_tensors()
    tensors[DENSE + "up_a"] = torch.empty(6, 128, device="meta")
    tensors[DENSE + "up_b"] = torch.zeros(256, 6).to_sparse()
    torch.save(tensors, tmp_path / "odd.pt")
    message = refusal(tmp_path / "odd.pt", MD3)
    assert "dense.0.up_a is without data" in message
    assert "dense.0.up_b is" in message


def test_other_suffixes_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter.bin").write_bytes(VARIANT.read_bytes())
    assert "supported suffixes" in refusal(tmp_path / "adapter.bin", MD2)
    assert "is not a file" in refusal(tmp_path, MD2)


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("version", "2", "version is '2', this program reads 1"),
        ("rank", "four", "rank is 'four', expected a number above 0"),
        ("rank", "0", "rank is '0', expected a number above 0"),
        ("rank", "8", "wrong shapes at rank 8 (24)"),
        ("alpha", "nan", "alpha is 'nan', expected a number above 0"),
        ("alpha", "-1", "alpha is '-1', expected a number above 0"),
        ("proj_input", "somewhere", "proj_input is 'somewhere', expected attention or block_norm"),
        ("targets", "", "targets has ''"),
        ("targets", "0.qkv 0.qkv", "targets has '0.qkv'"),
        ("targets", "0.Wte", "targets has '0.Wte'"),
        (
            "targets",
            "0.wte",
            "adapts the matrices wte, which the base model does not have (layer 0 has qkv, proj, fc1, fc2)",
        ),
        ("targets", "0.qkv", "unexpected tensors (22)"),
        ("targets", "3.qkv", "adapts layers [3], but the base model has 3 layers"),
    ],
)
def test_a_wrong_header_of_our_own_form_is_refused(tmp_path: Path, field: str, text: str, words: str) -> None:
    path = tmp_path / "own.safetensors"
    save_adapter(load_adapter(VARIANT, MD2), path)
    with safe_open(path, framework="pt") as file:
        texts = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=texts | {field: text})
    assert words in refusal(path, MD2)


@pytest.mark.parametrize(
    ("bent", "words"),
    [
        (LowRankPair(torch.zeros(4, 8), torch.full((8, 4), torch.nan)), "0.qkv.b holds values that are not finite"),
        (LowRankPair(torch.zeros(4, 8), torch.zeros(8, 3)), "a pair of rank [3, 4], expected 4"),
        (LowRankPair(torch.zeros(2, 8), torch.zeros(8, 2)), "a pair of rank [2], expected 4"),
        (LowRankPair(torch.zeros(2, 3, 8), torch.zeros(2, 8, 3)), "a pair of rank [3], expected 4"),
        (LowRankPair(torch.zeros(8), torch.zeros(8, 4)), "a pair of 1 and 2 dimensions"),
    ],
)
def test_an_adapter_that_could_not_be_loaded_is_not_written(tmp_path: Path, bent: LowRankPair, words: str) -> None:
    adapter = Adapter("kestrel-adapter", 4, {AdapterTarget(0, "qkv"): bent})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        save_adapter(adapter, tmp_path / "own.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_saving_refuses_a_wrong_header_and_a_wrong_suffix(tmp_path: Path) -> None:
    adapter = load_adapter(VARIANT, MD2)
    with pytest.raises(CheckpointError, match="alpha"):
        save_adapter(replace(adapter, alpha=0.0), tmp_path / "own.safetensors")
    with pytest.raises(CheckpointError, match="targets"):
        save_adapter(replace(adapter, targets={}), tmp_path / "own.safetensors")
    with pytest.raises(CheckpointError, match="safetensors"):
        save_adapter(adapter, tmp_path / "own.pt")
    assert list(tmp_path.iterdir()) == []
