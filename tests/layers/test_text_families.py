"""Text models of the usual families, put together from the shared layers, give the logits of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kestrel.kernels.ops import PLAIN
from kestrel.layers.attention import Attention, Heads, Rope
from kestrel.layers.decoder import SequentialBlock, TextDecoder
from kestrel.layers.mlp import GatedMlp
from kestrel.layers.norm import RmsNorm

DIM, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 48, 80, 6, 2, 16, 3, 97
COMMON = {
    "hidden_size": DIM, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
FAMILIES = {"llama": ("Llama", {}), "qwen2": ("Qwen2", {"qkv_bias": True}), "qwen3": ("Qwen3", {"qk_norm_eps": 1e-5})}
"""What their classes in `transformers` begin with, and what is theirs alone."""


def reference(family: str) -> Any:
    name, _ = FAMILIES[family]
    make_config, make_model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(5)
    model = make_model(make_config(**COMMON)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.08)
    return model


def from_layers(family: str, state: dict[str, Tensor]) -> TextDecoder:
    extras = {"qkv_bias": False, **FAMILIES[family][1]}
    blocks = (
        SequentialBlock(
            layer,
            RmsNorm(DIM, 1e-5),
            Attention(DIM, HEADS, KV_HEADS, HEAD_DIM, proj_bias=False, **extras),
            RmsNorm(DIM, 1e-5),
            GatedMlp(DIM, INNER),
        )
        for layer in range(LAYERS)
    )
    model = TextDecoder(VOCAB, DIM, blocks, RmsNorm(DIM, 1e-5), Rope(64, HEAD_DIM, 10_000.0))
    model.load_state_dict(renamed(state), strict=True)
    return model


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and joined matrices of the shared layers."""
    found = {
        "wte": state["model.embed_tokens.weight"],
        "post_ln.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    same = {
        "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attn.o_proj": "attn.proj",
        "mlp.down_proj": "mlp.down", "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    }  # fmt: skip
    joined = {"attn.qkv": [f"self_attn.{m}_proj" for m in "qkv"], "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"]}
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        for a, b in same.items():
            if f"{theirs}.{a}.weight" in state:
                found[f"{ours}.{b}.weight"] = state[f"{theirs}.{a}.weight"]
        for name, parts in joined.items():
            for side in ("weight", "bias"):
                if f"{theirs}.{parts[0]}.{side}" in state:
                    found[f"{ours}.{name}.{side}"] = torch.cat([state[f"{theirs}.{part}.{side}"] for part in parts])
    return found


def causal(layer: int, heads: Heads) -> Tensor:
    """One sequence from its beginning."""
    q, k, v = (x.transpose(0, 1)[None] for x in heads.rotated())
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("num_positions", [7, 30])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str, is_fused: bool, num_positions: int) -> None:
    theirs = reference(family)
    ours = from_layers(family, theirs.state_dict())
    if is_fused:
        ours.fuse(PLAIN)
    ids = torch.arange(num_positions) * 5 % VOCAB
    expected = theirs(ids[None]).logits[0]
    found = ours.logits(ours(ours.embed(ids), torch.arange(num_positions), causal))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_float8_weights_stay_near(family: str) -> None:
    theirs = reference(family)
    ours = from_layers(family, theirs.state_dict())
    ids = torch.arange(30)
    expected = theirs(ids[None]).logits[0]
    ours.fuse(PLAIN)
    ours.to_fp8()
    assert {p.dtype for n, p in ours.named_parameters() if "attn.qkv.w" in n or "mlp" in n} == {torch.float8_e4m3fn}
    for count in (7, 30):
        found = ours.logits(ours(ours.embed(ids[:count]), torch.arange(count), causal))
        error = (found - expected[:count]).norm() / expected[:count].norm()
        assert 1e-3 < error < 0.15
