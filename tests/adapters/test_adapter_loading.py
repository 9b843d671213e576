"""Adapter files that are right: each format gives the pairs that its names promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, load_adapter, save_adapter
from tests.adapters.adapter_files import HOSTED, MD2, MD3, VARIANT, hosted_tensors, variant_tensors


def sizes(adapter: Adapter) -> dict[tuple[int, str], tuple[list[int], list[int]]]:
    return {(t.layer, t.matrix): (list(p.a.shape), list(p.b.shape)) for t, p in adapter.targets.items()}


def assert_same_pairs(one: Adapter, other: Adapter) -> None:
    assert list(one.targets) == list(other.targets)
    for target, pair in one.targets.items():
        for mine, theirs in ((pair.a, other.targets[target].a), (pair.b, other.targets[target].b)):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def test_the_golden_variant_adapts_all_four_matrices_of_every_layer() -> None:
    adapter = load_adapter(VARIANT, MD2)
    of_one_layer = {
        "qkv": ([4, 128], [384, 4]),
        "proj": ([4, 128], [128, 4]),
        "fc1": ([4, 128], [256, 4]),
        "fc2": ([4, 256], [128, 4]),
    }
    assert (adapter.format, adapter.rank, adapter.scale) == ("torch-variant", 4, 1.0)
    assert adapter.proj_input == "block_norm"
    assert sizes(adapter) == {(layer, m): size for layer in range(3) for m, size in of_one_layer.items()}


def test_each_variant_tensor_reaches_its_own_place() -> None:
    adapter = load_adapter(VARIANT, MD2)
    tensors = variant_tensors()
    modules = {"qkv": "mixer.Wqkv", "proj": "mixer.out_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    for (layer, matrix), pair in adapter.targets.items():
        name = f"text_model.transformer.h.{layer}.{modules[matrix]}.parametrizations.weight.0."
        assert torch.equal(pair.a, tensors[name + "A"])
        assert torch.equal(pair.b, tensors[name + "B"])


def test_the_golden_fine_tune_shares_its_rank_among_the_experts_of_a_token() -> None:
    adapter = load_adapter(HOSTED, MD3)
    assert (adapter.format, adapter.rank, adapter.scale) == ("hosted-finetune", 6, 1.0)
    assert adapter.proj_input == "attention"
    assert sizes(adapter) == {
        (0, "fc1"): ([6, 128], [256, 6]),
        (0, "fc2"): ([6, 256], [128, 6]),
        (1, "fc1"): ([8, 2, 128], [8, 64, 2]),
        (1, "fc2"): ([8, 2, 32], [8, 128, 2]),
        (2, "fc1"): ([8, 2, 128], [8, 64, 2]),
        (2, "fc2"): ([8, 2, 32], [8, 128, 2]),
    }


def test_experts_of_a_fine_tune_are_counted_from_the_first_layer_of_experts() -> None:
    pair = load_adapter(HOSTED, MD3).targets[AdapterTarget(2, "fc2")]
    assert torch.equal(pair.a, hosted_tensors()["text_lora.moe.1.down_a"])
    assert torch.equal(pair.b, hosted_tensors()["text_lora.moe.1.down_b"])


@pytest.mark.parametrize("prefix", ["text_lora.", "_text.", ""])
@pytest.mark.parametrize("kind", ["safetensors", "flat.pt", "nested.pt"])
def test_a_fine_tune_is_the_same_under_every_prefix_and_container(tmp_path: Path, prefix: str, kind: str) -> None:
    path = tmp_path / f"finetune.{kind}"
    tensors = hosted_tensors(prefix)
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save({"lora_state_dict": tensors, "step": 40} if kind == "nested.pt" else tensors, path)
    adapter = load_adapter(str(path), MD3)
    assert_same_pairs(adapter, load_adapter(HOSTED, MD3))
    assert adapter.metadata == ({"step": "40"} if kind == "nested.pt" else {})


def test_a_fine_tune_may_repeat_itself_under_both_prefixes(tmp_path: Path) -> None:
    torch.save({"lora_state_dict": hosted_tensors() | hosted_tensors("_text.")}, tmp_path / "twice.pt")
    assert_same_pairs(load_adapter(tmp_path / "twice.pt", MD3), load_adapter(HOSTED, MD3))


def test_a_fine_tune_of_a_dense_model_has_dense_layers_only(tmp_path: Path) -> None:
    shape = replace(MD3, layers=MD3.layers[:1])
    torch.save({k: v for k, v in hosted_tensors().items() if "dense" in k}, tmp_path / "dense.pt")
    assert len(load_adapter(tmp_path / "dense.pt", shape).targets) == 2


def test_a_variant_loads_from_a_torch_file_and_owns_its_memory(tmp_path: Path) -> None:
    # Parameters and transposed views are what a training script saves.
    tensors = {name: torch.nn.Parameter(t.t().contiguous().t()) for name, t in variant_tensors().items()}
    torch.save(tensors, tmp_path / "final.pt")
    adapter = load_adapter(tmp_path / "final.pt", MD2)
    assert_same_pairs(adapter, load_adapter(VARIANT, MD2))
    assert all(t.is_contiguous() and not t.requires_grad for p in adapter.targets.values() for t in (p.a, p.b))


def test_a_loaded_adapter_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "variant.safetensors"
    path.write_bytes(VARIANT.read_bytes())
    adapter = load_adapter(path, MD2)
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert_same_pairs(adapter, load_adapter(VARIANT, MD2))


@pytest.mark.parametrize(("source", "shape"), [(VARIANT, MD2), (HOSTED, MD3)], ids=["variant", "hosted"])
def test_our_own_form_gives_back_all_that_was_saved(tmp_path: Path, source: Path, shape: AdapterShape) -> None:
    original = replace(
        load_adapter(source, shape), alpha=12.5, base_model="tiny", metadata={"format": "x", "née": "ü "}
    )
    save_adapter(original, tmp_path / "own.safetensors")
    loaded = load_adapter(tmp_path / "own.safetensors", shape)
    assert_same_pairs(loaded, original)
    assert loaded.format == "kestrel-adapter"
    assert (loaded.rank, loaded.alpha, loaded.scale) == (original.rank, 12.5, 12.5 / original.rank)
    assert loaded.proj_input == original.proj_input
    assert (loaded.base_model, loaded.metadata) == ("tiny", original.metadata)
    assert [file.name for file in tmp_path.iterdir()] == ["own.safetensors"]


def test_our_own_form_may_adapt_some_matrices_and_leave_the_optional_fields_out(tmp_path: Path) -> None:
    whole = load_adapter(VARIANT, MD2)
    part = replace(whole, targets={t: p for t, p in whole.targets.items() if t in ((1, "qkv"), (2, "fc2"))})
    save_adapter(part, tmp_path / "own.safetensors")
    loaded = load_adapter(tmp_path / "own.safetensors", MD2)
    assert_same_pairs(loaded, part)
    assert (loaded.alpha, loaded.scale, loaded.base_model, loaded.metadata) == (None, 1.0, None, {})


def test_attention_pairs_need_no_multiple_of_the_experts(tmp_path: Path) -> None:
    variant = load_adapter(VARIANT, MD2)
    attention = replace(variant, targets={t: p for t, p in variant.targets.items() if t.matrix == "qkv"})
    save_adapter(attention, tmp_path / "own.safetensors")
    assert load_adapter(tmp_path / "own.safetensors", MD3).rank == 4


def test_pairs_cannot_be_replaced_after_the_check() -> None:
    adapter = load_adapter(VARIANT, MD2)
    with pytest.raises(TypeError):
        adapter.targets[AdapterTarget(0, "qkv")] = adapter.targets[AdapterTarget(1, "qkv")]  # pyright: ignore


def test_the_same_adapter_is_the_same_bytes(tmp_path: Path) -> None:
    adapter = replace(load_adapter(HOSTED, MD3), metadata={str(n): "ä" * n for n in range(20)}, base_model="house")
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for file in files:
        save_adapter(adapter, file)
    assert len({file.read_bytes() for file in files}) == 1
    assert load_adapter(files[0], MD3).metadata == adapter.metadata
