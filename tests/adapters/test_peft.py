"""Folders of the peft library: what they say is what is loaded, and what is not done is refused by its field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kestrel.adapters import Adapter, AdapterId, AdapterShape, AdapterTarget, load_adapter, save_adapter
from kestrel.adapters.sources import FolderSource
from kestrel.errors import AdapterNotFound, AdapterUnusable, CheckpointError
from tests.adapters.adapter_files import MD2
from tests.adapters.peft_files import CONFIG, LLAMA, MOE, NAMES, fused_tensors, peft_tensors, write_peft


def delta(adapter: Adapter, layer: int, matrix: str) -> torch.Tensor:
    pair = adapter.targets[AdapterTarget(layer, matrix)]
    return adapter.scale * pair.b @ pair.a


def refusal(folder: Path, shape: AdapterShape = LLAMA) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(folder, shape)
    return str(caught.value)


def test_each_tensor_reaches_its_own_matrix(tmp_path: Path) -> None:
    tensors = peft_tensors(list(NAMES))
    adapter = load_adapter(write_peft(tmp_path / "all", tensors, target_modules=list(NAMES)), LLAMA)
    assert (adapter.format, adapter.rank, adapter.alpha, adapter.scale) == ("peft", 4, 8.0, 2.0)
    assert adapter.base_model is None, "a name or path from another machine says nothing about what is served"
    assert adapter.metadata == {"base_model_name_or_path": "someone/tiny", "peft_version": "0.17.0"}
    assert len(adapter.targets) == len(NAMES) * LLAMA.num_layers
    for layer in range(LLAMA.num_layers):
        for matrix, module in NAMES.values():
            name, pair = f"base_model.model.model.layers.{layer}.{module}", adapter.targets[layer, matrix]  # type: ignore[index]
            assert torch.equal(pair.a, tensors[f"{name}.lora_A.weight"])
            assert torch.equal(pair.b, tensors[f"{name}.lora_B.weight"])


def test_ranks_and_alphas_of_single_modules_make_the_same_deltas(tmp_path: Path) -> None:
    tensors = peft_tensors(["q_proj", "v_proj", "up_proj"], q_proj=6, up_proj=2)
    folder = write_peft(
        tmp_path / "mixed",
        tensors,
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"q_proj": 6, "mlp.up_proj": 2},
        alpha_pattern={"model.layers.1.self_attn.v_proj": 3, "layers.1.self_attn.v_proj": 99},
    )
    adapter = load_adapter(folder, LLAMA)
    assert adapter.rank == 6
    for layer in range(LLAMA.num_layers):
        scales = {"q_proj": 8 / 6, "up_proj": 8 / 2, "v_proj": 3 / 4 if layer == 1 else 8 / 4}
        for end, scale in scales.items():
            matrix, module = NAMES[end]
            name = f"base_model.model.model.layers.{layer}.{module}"
            expected = scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            torch.testing.assert_close(delta(adapter, layer, matrix), expected)
    save_adapter(adapter, tmp_path / "own.safetensors")
    again = load_adapter(tmp_path / "own.safetensors", LLAMA)
    torch.testing.assert_close(delta(again, 1, "v"), delta(adapter, 1, "v"), rtol=0, atol=0)


def test_rank_stabilised_adapters_are_divided_by_the_root(tmp_path: Path) -> None:
    assert load_adapter(write_peft(tmp_path / "rs", use_rslora=True, lora_alpha=6), LLAMA).scale == 3.0
    tensors = peft_tensors(["q_proj", "v_proj"], q_proj=9)
    mixed = load_adapter(write_peft(tmp_path / "mixed", tensors, use_rslora=True, rank_pattern={"q_proj": 9}), LLAMA)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    expected = 8 / 3 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    torch.testing.assert_close(delta(mixed, 0, "q"), expected)


def test_modules_of_a_model_without_a_head_are_the_same(tmp_path: Path) -> None:
    tensors = {name.replace("model.model.", "model."): tensor for name, tensor in peft_tensors(["q_proj"]).items()}
    adapter = load_adapter(write_peft(tmp_path / "bare", tensors, target_modules=["q_proj"]), LLAMA)
    assert len(adapter.targets) == LLAMA.num_layers


def test_a_choice_of_layers_is_what_the_tensors_say(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in peft_tensors(["q_proj"]).items() if ".layers.1." in name}
    for name, changes in (
        ("listed", {"layers_to_transform": [1]}),
        ("expression", {"target_modules": r".*\.1\..*q_proj"}),
    ):
        folder = write_peft(tmp_path / name, tensors, **{"target_modules": ["q_proj"], **changes})
        assert list(load_adapter(folder, LLAMA).targets) == [AdapterTarget(1, "q")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", None),
        ("use_rslora", "yes"),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),  # of peft 0.17
        ("target_parameters", ["lm_head.weight"]),
        ("target_modules", ["q_proj", "lm_head"]),
        ("rank_pattern", {"(a+)+q_proj": 8}),
        ("alpha_pattern", [1]),
        ("some_field_of_the_future", {"x": 1}),
    ],
)
def test_what_is_not_done_is_refused_by_the_name_of_its_field(tmp_path: Path, field: str, value: Any) -> None:
    assert re.search(
        rf"adapter_config\.json: {field}(\.\S+)? is .+; ", refusal(write_peft(tmp_path / "a", **{field: value}))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop layers.1.self_attn.q_proj.lora_B", "lacks tensors .*layers.1.self_attn.q_proj.lora_B"),
        ("drop layers.1.self_attn.q_proj", "lacks tensors .*layers.1.self_attn.q_proj.lora_A"),
        (
            "add base_model.model.lm_head.lora_A.weight",
            "not LoRA factors of .*: base_model.model.lm_head.lora_A.weight;",
        ),
        ("add base_model.model.model.layers.0.mlp.experts.lora_A.weight", "not LoRA factors of .*experts"),
        ("add base_model.model.layers.0.self_attn.q_proj.lora_A.weight", "are the same matrix"),
    ],
)
def test_tensors_that_do_not_make_an_adapter_are_named(tmp_path: Path, change: str, message: str) -> None:
    verb, name = change.split()
    tensors = peft_tensors(["q_proj", "v_proj"])
    if verb == "add":
        tensors[name] = torch.ones(4, 64)
    tensors = {key: tensor for key, tensor in tensors.items() if verb == "add" or name not in key}
    assert re.search(message, refusal(write_peft(tmp_path / "a", tensors)))


def test_sizes_that_contradict_the_config_or_the_model_are_named(tmp_path: Path) -> None:
    told = refusal(write_peft(tmp_path / "a", r=8))
    assert "the factors of model.layers.0.self_attn.q_proj are [4, 64] and [64, 4]" in told
    assert "the rank 8" in told
    tensors = peft_tensors(["q_proj"]) | {
        f"base_model.model.model.layers.9.self_attn.q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"
    }
    told = refusal(write_peft(tmp_path / "b", tensors, target_modules=".*q_proj"))
    assert "adapts layers [9], but the base model has 3 layers" in told
    with pytest.raises(CheckpointError, match="adapts the matrices q, v, which the base model does not have"):
        load_adapter(write_peft(tmp_path / "c"), MD2)


def test_experts_that_do_not_make_an_adapter_are_named(tmp_path: Path) -> None:
    names, own = ["gate_proj", "up_proj", "down_proj"], "base_model.model.model.layers.0.mlp"
    whole, fused = peft_tensors(names, kind="qwen3_moe"), fused_tensors(4)

    def pair(module: str, num_in: int, num_out: int) -> dict[str, torch.Tensor]:
        factors = {"A": torch.ones(4, num_in), "B": torch.ones(num_out, 4)}
        return {f"{own}.{module}.lora_{side}.weight": factor for side, factor in factors.items()}

    def told(tensors: dict[str, torch.Tensor], **changes: Any) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return refusal(write_peft(folder, tensors, **{"target_modules": names, **changes}), MOE)

    lacking = {name: tensor for name, tensor in whole.items() if ".layers.2.mlp.experts.5.up_proj." not in name}
    assert re.search(r"lacks tensors .*layers\.2\.mlp\.experts\.5\.up_proj\.lora_A", told(lacking))
    assert "adapts an expert 6, but the base model has 6 experts" in told(whole | pair("experts.6.up_proj", 64, 24))
    assert "layer 0 (gate_proj, up_proj) differ in size" in told(whole | pair("experts.5.up_proj", 64, 25))
    assert "the whole down of layer 0 and parts of it, which are the same" in told(whole | pair("down_proj", 24, 64))
    assert "adapts the matrices up, which" in told(pair("up_proj", 64, 24), target_modules=".*layers.0.mlp.up_proj")
    changes = {"target_modules": [], "target_parameters": names[2:], "peft_version": "0.21.2"}
    assert "not LoRA factors of" in told(fused, **changes), "two wrappers, of which the config names one"
    outer = {name: tensor for name, tensor in fused.items() if "base_layer" not in name}
    assert "the rank 3 (r, rank_pattern) for each of 6 experts" in told(outer, r=3, **changes)
    del outer[f"{own}.experts.lora_A.weight"], outer[f"{own}.experts.lora_B.weight"]
    assert re.search(r"lacks tensors .*layers\.0\.mlp\.experts\.down_proj\.lora_A", told(outer, **changes))


def test_experts_are_stacked_and_those_without_a_delta_are_zeros(tmp_path: Path) -> None:
    names = (".experts.2.up_proj.", ".experts.4.gate_proj.")
    found = peft_tensors(["gate_proj", "up_proj"], kind="qwen3_moe")
    tensors = {name: tensor for name, tensor in found.items() if any(own in name for own in names)}
    adapter = load_adapter(write_peft(tmp_path / "a", tensors, target_modules=".*experts.*"), MOE)
    assert list(adapter.targets) == [AdapterTarget(0, "gate_up"), AdapterTarget(2, "gate_up")], "layer 1 is dense"
    delta_EFD, name = delta(adapter, 2, "gate_up"), "base_model.model.model.layers.2.mlp.experts"
    assert delta_EFD.shape == (6, 48, 64)
    expected_EFD = torch.zeros_like(delta_EFD)
    for own, expert, rows in (("2.up_proj", 2, slice(24, 48)), ("4.gate_proj", 4, slice(24))):
        expected_EFD[expert, rows] = (
            2.0 * tensors[f"{name}.{own}.lora_B.weight"] @ tensors[f"{name}.{own}.lora_A.weight"]
        )
    torch.testing.assert_close(delta_EFD, expected_EFD)
    save_adapter(adapter, tmp_path / "own.safetensors")
    again = load_adapter(tmp_path / "own.safetensors", MOE)
    torch.testing.assert_close(delta(again, 2, "gate_up"), delta_EFD, rtol=0, atol=0)


def test_half_a_folder_says_which_half_is_missing(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a")
    assert "adapter_config.json: r is" not in refusal(write_peft(tmp_path / "b", lora_alpha=-1))
    for text, message in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        (folder / "adapter_config.json").write_text(text)
        assert message in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json does not exist; copy the" in refusal(folder)
    (tmp_path / "lone.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    assert "keep it as adapter_model.safetensors in a folder" in refusal(tmp_path / "lone.safetensors")
    pickled = write_peft(tmp_path / "c")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "has no adapter_model.safetensors; save the adapter as safetensors" in refusal(pickled)


def test_our_own_form_may_have_any_name(tmp_path: Path) -> None:
    adapter = load_adapter(write_peft(tmp_path / "a"), LLAMA)
    save_adapter(adapter, tmp_path / "adapter_model.safetensors")
    assert load_adapter(tmp_path / "adapter_model.safetensors", LLAMA).format == "kestrel-adapter"


# ---------------------------------------------------------------------- in the folder of adapters


async def version(source: FolderSource, name: str = "mine") -> str:
    copy = await source.fetch(AdapterId.parse(name))
    assert copy.is_current
    assert load_adapter(copy.path, LLAMA).format == "peft"
    return copy.digest


async def test_a_folder_is_found_by_its_name_and_either_file_makes_a_new_version(tmp_path: Path) -> None:
    folder, source = write_peft(tmp_path / "mine"), FolderSource(tmp_path)
    first = await version(source)
    assert (await source.fetch(AdapterId("mine"))).digest == first
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(CONFIG | {"lora_alpha": 16}))
    second = await version(source)
    save_file(peft_tensors(["q_proj", "v_proj"], seed=5), folder / "adapter_model.safetensors")
    assert len({first, second, await version(source)}) == 3
    assert [(listing.name, listing.problem) for listing in await source.list()] == [("mine", None)]
    with pytest.raises(AdapterNotFound):
        await version(source, "adapter_model")


async def test_links_of_either_file_stay_inside(tmp_path: Path) -> None:
    outside, inside = write_peft(tmp_path / "outside"), tmp_path / "inside"
    real, source = write_peft(inside / "real"), FolderSource(inside)
    for name in ("config.json", "model.safetensors"):
        linked = inside / f"leak-{name[:5]}"
        linked.mkdir()
        for file in real.iterdir():
            (linked / file.name).symlink_to(outside / file.name if file.name.endswith(name) else f"../real/{file.name}")
        with pytest.raises(AdapterUnusable, match="leaves the folder") as caught:
            await version(source, linked.name)
        assert str(tmp_path) not in str(caught.value)
    (inside / "alias").mkdir()
    for file in real.iterdir():
        (inside / "alias" / file.name).symlink_to(f"../real/{file.name}")
    assert await version(source, "alias") == await version(source, "real")


async def test_a_folder_without_safetensors_is_listed_with_the_reason(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    source = FolderSource(tmp_path)
    assert "no adapter_model.safetensors" in ((await source.list())[0].problem or "")
    with pytest.raises(AdapterUnusable, match="save it as safetensors"):
        await version(source, "pickled")
