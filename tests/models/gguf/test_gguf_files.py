"""GGUF files: the numbers, names and settings that are in them, and every way a file can be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError
from kestrel.families import load, resolve
from kestrel.models.checkpoint_files import open_checkpoint
from kestrel.models.gguf.config import hub_config, read_chat_template, read_hub_config
from kestrel.models.gguf.header import GgufHeader
from kestrel.models.gguf.tensors import hub_name
from tests.llama.tiny_folders import CONTEXT, END_OF_TURN, FF, HEAD_DIM, START, STOP, VOCAB, write_folder
from tests.models.gguf.files import convert, own_name, write_gguf, write_quantised

ARCHITECTURES = {
    "llama": "llama",
    "tied": "llama",
    "biased": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
MODEL = {"general.architecture": "llama", "llama.attention.head_count": 2}
PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of a kind as a file; `changes` are made to its metadata."""
    root = tmp_path_factory.mktemp("gguf")
    folders: dict[str, Path] = {}

    def make(kind: str, changes: dict[str, Any] | None = None) -> Path:
        if kind not in folders:
            folders[kind] = write_folder(root / kind, kind)
            convert(folders[kind], root / f"{kind}.gguf", ARCHITECTURES[kind])
        if changes is None:
            return root / f"{kind}.gguf"
        return convert(folders[kind], root / "changed.gguf", ARCHITECTURES[kind], changes)

    return make


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load(resolve(RuntimeConfig(model_path=path, device="cpu")), "cpu", dtype)


# ---------------------------------------------------------------------- what a file holds


def dequantisable() -> list[GGMLQuantizationType]:
    found = []
    for kind in GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", dequantisable(), ids=lambda kind: kind.name)
def test_each_type_loads_to_the_numbers_of_the_format(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    try:
        data = gguf.quantize(dice.normal(size=(6, 512)).astype(np.float32), kind)
    except NotImplementedError:  # the package can only read it: any bytes are numbers, small ones finite numbers
        block, num_bytes = GGML_QUANT_SIZES[kind]
        data = dice.integers(0, 0x60, (6, 512 // block * num_bytes), np.uint8)
    path = write_quantised(tmp_path / "m.gguf", MODEL, {"blk.0.ffn_up.weight": (data, kind)})
    with open_checkpoint(path) as checkpoint:
        (name,) = checkpoint.tensors
        found = checkpoint.read(name)
        assert name == "model.layers.0.mlp.up_proj.weight"
        assert (tuple(found.shape), found.dtype) == (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
    assert kind in PLAIN or found.dtype == torch.float32
    assert found.float().std() > 0
    np.testing.assert_array_equal(found.float().numpy(), gguf.dequantize(data, kind))


def test_a_tensor_of_many_chunks_is_whole(tmp_path: Path) -> None:
    data = gguf.quantize(
        np.random.default_rng(0).normal(size=(3000, 1024)).astype(np.float32), GGMLQuantizationType.Q8_0
    )
    path = write_quantised(tmp_path / "m.gguf", MODEL, {"output.weight": (data, GGMLQuantizationType.Q8_0)})
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.read("lm_head.weight").numpy()
    np.testing.assert_array_equal(found, gguf.dequantize(data, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_converted_model_is_the_model_of_its_folder(kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / kind, kind)
    from_file, from_folder = loaded(convert(folder, tmp_path / "m.gguf", ARCHITECTURES[kind])), loaded(folder)
    assert from_file.config == from_folder.config
    expected = dict(from_folder.model.named_parameters())
    found = dict(from_file.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
    for text in ("hey there", "ab, cab\n 12", "<s></s>"):
        assert from_file.tokenizer.decode(from_file.tokenizer.encode(text)) == text
    assert from_file.tokenizer.start_id == from_folder.tokenizer.start_id
    assert from_file.tokenizer.special_ids == from_folder.tokenizer.special_ids
    assert from_file.name == "m"


def test_a_folder_with_one_file_stands_for_it(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "only.gguf").symlink_to(tiny_gguf("llama"))
    located = resolve(RuntimeConfig(model_path=tmp_path, device="cpu"))
    assert (located.name, located.family) == ("only", "llama")
    assert located.weights == located.tokenizer == tmp_path / "only.gguf"


def test_a_quantised_model_has_the_dequantised_numbers_in_any_dtype(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", "llama")
    path = convert(folder, tmp_path / "m.gguf", "llama", quantised=GGMLQuantizationType.Q4_0)
    full, half = loaded(path).model, loaded(path, torch.bfloat16).model
    original = loaded(folder).model
    assert not torch.equal(full.wte, original.wte)
    torch.testing.assert_close(full.wte, original.wte, rtol=0, atol=0.1)
    assert torch.equal(half.wte, full.wte.bfloat16())
    assert torch.equal(half.blocks[0].attn.qkv.weight, full.blocks[0].attn.qkv.weight.bfloat16())


def test_metadata_read_as_a_config_of_the_hub(tiny_gguf: Callable[..., Path]) -> None:
    config = read_hub_config(tiny_gguf("llama"))
    assert config["eos_token_id"] == [STOP, END_OF_TURN]
    assert config["bos_token_id"] == START
    assert (config["vocab_size"], config["intermediate_size"], config["head_dim"]) == (VOCAB, FF, HEAD_DIM)
    assert config["max_position_embeddings"] == CONTEXT
    assert config["rms_norm_eps"] == 1e-5, "as a decimal of single precision"
    assert config["rope_scaling"] is None
    assert read_chat_template(tiny_gguf("llama")) == "{{ messages }}"
    assert read_chat_template(tiny_gguf("llama", {"tokenizer.chat_template": None})) is None


def test_control_tokens_of_the_usual_names_end_a_text(tiny_gguf: Callable[..., Path]) -> None:
    header = GgufHeader.read(tiny_gguf("llama", {"tokenizer.ggml.eot_token_id": None}))
    tokens, types = list(header.values["tokenizer.ggml.tokens"]), list(header.values["tokenizer.ggml.token_type"])
    tokens[END_OF_TURN] = "<|im_end|>"
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.eot_token_id": None}
    assert read_hub_config(tiny_gguf("llama", changes))["eos_token_id"] == [STOP, END_OF_TURN]
    types[END_OF_TURN] = 1
    assert read_hub_config(tiny_gguf("llama", changes))["eos_token_id"] == [STOP]


def test_experts_are_taken_apart(tmp_path: Path) -> None:
    data = gguf.quantize(np.random.default_rng(0).normal(size=(5, 4, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
    values = {"general.architecture": "qwen3moe"}
    tensors = {"blk.3.ffn_down_exps.weight": (data, GGMLQuantizationType.Q8_0)}
    with open_checkpoint(write_quantised(tmp_path / "m.gguf", values, tensors)) as checkpoint:
        assert list(checkpoint.tensors) == [f"model.layers.3.mlp.experts.{n}.down_proj.weight" for n in range(5)]
        for found, part in zip(map(checkpoint.read, checkpoint.tensors), data, strict=True):
            np.testing.assert_array_equal(found.numpy(), gguf.dequantize(part, GGMLQuantizationType.Q8_0))
    assert hub_name("blk.3.ffn_gate_inp.weight") == "model.layers.3.mlp.gate.weight"


def test_settings_of_experts_are_said_in_the_words_of_the_hub(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    values = {
        key.replace("qwen3.", "qwen3moe."): value for key, value in GgufHeader.read(tiny_gguf("qwen3")).values.items()
    }
    experts = {"expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 32}
    values |= {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in experts.items()}
    tensors = {
        "token_embd.weight": (VOCAB, 64),
        "blk.0.ffn_gate_inp.weight": (16, 64),
        "blk.2.ffn_gate_inp.weight": (16, 64),
    }
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    config = read_hub_config(write_gguf(tmp_path / "m.gguf", values, zeros))
    names = ("model_type", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    assert [config[name] for name in names] == ["qwen3_moe", 16, 4, 32, True]
    assert config["mlp_only_layers"] == [1]


def test_a_window_makes_it_a_mistral(tiny_gguf: Callable[..., Path]) -> None:
    config = read_hub_config(tiny_gguf("llama", {"llama.attention.sliding_window": 128}))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 128)


# ---------------------------------------------------------------------- rope


YARN = {
    "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
    "qwen2.rope.scaling.original_context_length": 64,
}  # fmt: skip
SCALINGS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"qwen2.rope.scaling.type": "none"}, None),
    ({"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 1.0}, None),
    ({"qwen2.rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    ({"qwen2.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    (
        YARN | {"qwen2.rope.scaling.yarn_beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), SCALINGS)
def test_rope_scaling_is_said_in_the_words_of_the_hub(
    changes: dict[str, Any], expected: dict[str, Any] | None, tiny_gguf: Callable[..., Path]
) -> None:
    assert read_hub_config(tiny_gguf("qwen2", changes))["rope_scaling"] == expected


def with_factors(path: Path, source: Path, factors: np.ndarray) -> Path:
    header = GgufHeader.read(source)
    embedding = np.zeros((VOCAB, 64), np.float32)
    return write_gguf(path, header.values, {"token_embd.weight": embedding, "rope_freqs.weight": factors})


def test_the_factors_of_llama_3_are_recognised(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """Of eight frequencies the first six turn more than four times within 8192 positions, the last not once."""
    turns = 8192 / (2 * math.pi * 10_000.0 ** (6 / 8))
    kept = (turns - 1) / (4 - 1)
    assert 0 < kept < 1
    factors = np.array([*[1.0] * 6, 1 / ((1 - kept) / 32 + kept), 32.0], np.float32)
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    path = with_factors(tmp_path / "m.gguf", tiny_gguf("llama"), factors)
    header = GgufHeader.read(path)
    assert hub_config(header)["rope_scaling"] == scaling
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["model.embed_tokens.weight"], "factors are no weights"
    ones = with_factors(tmp_path / "ones.gguf", tiny_gguf("llama"), np.ones_like(factors))
    assert read_hub_config(ones)["rope_scaling"] is None
    others = with_factors(tmp_path / "others.gguf", tiny_gguf("llama"), factors[::-1].copy())
    with pytest.raises(CheckpointError, match=r"others\.gguf: the tensor rope_freqs\.weight scales rope in a way"):
        read_hub_config(others)


# ---------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'; supported are: llama"),
    "no architecture": ({"general.architecture": None}, "the key general.architecture is missing"),
    "no layers": ({"llama.block_count": None}, "the key llama.block_count is missing"),
    "layers": ({"llama.block_count": "many"}, "llama.block_count is 'many'; expected a whole number"),
    "sizes per layer": ({"llama.feed_forward_length": [96, 96]}, r"llama.feed_forward_length is \[96, 96\]; expected"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8; only 0 is supported"),
    "unknown key": ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5; this key is not known here"),
    "rope type": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'; supported are none"),
    "rope key": ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "llama.rope.scaling.yarn_ext_factor is 1.0; this key"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "the key llama.rope.scaling.original_context_length is missing"),
    "partial rope": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only the size of a head"),
    "parts": ({"split.count": 3}, "split.count is 3; models in several files"),
    "no end": ({"tokenizer.ggml.eos_token_id": None}, "the key tokenizer.ggml.eos_token_id is missing"),
    "end": ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id is 9999; the vocabulary has no"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are gpt2"),
    "words": ({"tokenizer.ggml.pre": "jais"}, "tokenizer.ggml.pre is 'jais'; supported are: gpt-2"),
    "no words": ({"tokenizer.ggml.pre": None}, "the key tokenizer.ggml.pre is missing"),
    "end id": ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token is True; a model that"),
    "merges": ({"tokenizer.ggml.merges": ["a q"]}, r"its vocabulary is damaged \(.*Token `aq` out of vocabulary\)"),
    "merge": ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab', not two parts"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 260 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_asks_for_and_is_not_built_is_refused_by_its_key(case: str, tiny_gguf: Callable[..., Path]) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=rf"changed\.gguf.*{message}"):
        loaded(tiny_gguf("llama", changes))


def test_a_window_of_qwen_is_refused(tiny_gguf: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"qwen2\.attention\.sliding_window is 64; a sliding window"):
        read_hub_config(tiny_gguf("qwen2", {"qwen2.attention.sliding_window": 64}))


def test_tensors_that_the_model_does_not_know_are_refused_by_name(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    header = GgufHeader.read(tiny_gguf("llama"))
    names = {
        "token_embd.weight": np.zeros((VOCAB, 64), np.float32),
        "blk.0.ssm_in.weight": np.zeros((4, 8), np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", header.values, names)
    with pytest.raises(CheckpointError, match=r"(?s)m\.gguf does not fit.*unexpected tensors \(1\): blk\.0\.ssm_in"):
        loaded(path)
    vocabulary = write_gguf(tmp_path / "v.gguf", header.values)
    with pytest.raises(CheckpointError, match=r"v\.gguf: the tensor token_embd\.weight is missing"):
        loaded(vocabulary)
    odd = write_gguf(tmp_path / "odd.gguf", header.values, {"blk.0.attn_q.weight": np.zeros((6, 4), np.float32)})
    with pytest.raises(
        CheckpointError, match=r"odd\.gguf: the tensor blk\.0\.attn_q\.weight has 6 rows, which are not 4 heads"
    ):
        open_checkpoint(odd)


def test_types_that_cannot_be_dequantised_are_refused_before_the_load(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.I32
    path = write_quantised(tmp_path / "m.gguf", MODEL, {"output.weight": (np.zeros((2, 4), np.int32), kind)})
    with pytest.raises(CheckpointError, match=r"m\.gguf: the tensor output\.weight is stored as I32"):
        open_checkpoint(path)


def test_a_file_cut_anywhere_names_itself(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_gguf("llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, 1500, 17), *range(1500, len(whole), 9001), len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf (is not a GGUF file|is damaged: it ends)"):
            GgufHeader.read(cut)
    with pytest.raises(CheckpointError, match=r"absent\.gguf does not exist"):
        resolve(RuntimeConfig(model_path=tmp_path / "absent.gguf", device="cpu"))


def test_flipped_bytes_give_a_header_or_a_refusal(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_gguf("llama").read_bytes()
    changed, dice = tmp_path / "changed.gguf", np.random.default_rng(0)
    refusals = []
    for _ in range(120):
        content = bytearray(whole)
        content[int(dice.integers(4, 9000))] = int(dice.integers(256))
        changed.write_bytes(content)
        try:
            GgufHeader.read(changed)
        except CheckpointError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < 120
    assert all("changed.gguf" in refusal for refusal in refusals)


def test_versions_byte_orders_and_types_of_others_are_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_gguf("llama").read_bytes()
    path = tmp_path / "m.gguf"
    for version in (b"\x01\0\0\0", b"\0\0\0\x03", b"\x09\0\0\0"):
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(CheckpointError, match=r"m\.gguf is GGUF of version"):
            GgufHeader.read(path)
    unknown = whole.replace(
        b"output_norm.weight\x01\0\0\0\x40" + bytes(7) + b"\0", b"output_norm.weight\x01\0\0\0\x40" + bytes(7) + b"\xc8"
    )
    assert unknown != whole
    path.write_bytes(unknown)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has the unknown type 200"):
        GgufHeader.read(path)


def test_names_go_to_the_hub_and_back() -> None:
    for name in ("model.embed_tokens.weight", "model.layers.12.self_attn.k_proj.bias", "model.norm.weight"):
        assert hub_name(own_name(name)) == name
    assert hub_name("rope_freqs.weight") == "rope_freqs.weight"
