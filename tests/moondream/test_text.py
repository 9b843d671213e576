"""The text model: attention pieces against the reference, and the promises of its contract."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kestrel.kernels.rotary import apply_rope, tau_position
from kestrel.layers.attention import Attention, Heads, Rope, Step
from kestrel.moondream.config import MoeConfig, TextConfig
from kestrel.moondream.model import TextModel
from kestrel.runtime.device import computing

from .goldens import FAMILIES, golden, tensors
from .naive_generator import NO_BLOCK, DenseAttention

TINY = TextConfig(
    dim=32, ff_dim=48, n_layers=3, vocab_size=50, max_context=64, n_heads=4, n_kv_heads=4, prefix_attn=730, rotary_dim=4
)
TINY_MOE = replace(TINY, tau_attn=True, moe=MoeConfig(4, 1, 2, expert_inner_dim=8))


def causal(num_positions: int) -> DenseAttention:
    attention = DenseAttention()
    attention.block_of = [NO_BLOCK] * num_positions
    return attention


def run(model: TextModel, ids: Tensor) -> Tensor:
    return model(model.embed(ids), torch.arange(len(ids)), causal(len(ids)))


class RopeInFloat64(Rope):
    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(positions_T)
        return cos.double(), sin.double()


def in_float64(attention: Attention, y_TD: Tensor, positions: Tensor) -> Tensor:
    """All products; the factors of tau are rounded to float32."""
    text = golden("md3").config.text
    rope = RopeInFloat64(text.max_context, text.rotary_dim, text.rope_theta)
    return deepcopy(attention).double()(y_TD.double(), 0, Step(positions, causal(len(y_TD)), rope))


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_tables_equal_the_reference(family: str) -> None:
    units, rope = tensors(family, "units"), golden(family).model.text.rope
    cos, sin = rope(units["rope_positions"])
    torch.testing.assert_close(cos, units["rope_cos"], rtol=0.0, atol=1e-6)
    torch.testing.assert_close(sin, units["rope_sin"], rtol=0.0, atol=1e-6)


def test_rotated_queries_equal_the_reference_up_to_its_interleaved_layout() -> None:
    units, rope = tensors("md2", "units"), golden("md2").model.text.rope
    q_THD = units["rope_q_in"][0].transpose(0, 1)
    rotated = apply_rope(q_THD, *rope(units["rope_q_pos"]))
    interleaved = torch.stack([rotated[..., :16], rotated[..., 16:32]], dim=-1).flatten(-2)
    expected = units["rope_q_out_reference_layout"][0].transpose(0, 1)
    torch.testing.assert_close(torch.cat([interleaved, rotated[..., 32:]], dim=-1), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("start", [0, 700, 1000])
@torch.inference_mode()
def test_tau_attention_equals_the_reference(start: int) -> None:
    units, text = tensors("md3", "units"), golden("md3").model.text
    attention = text.blocks[0].attn
    assert isinstance(attention, Attention)
    assert attention.tau is not None
    y_TD = units[f"attn_in_pos{start}"][0]
    positions = torch.arange(start, start + len(y_TD))
    tau_q, tau_v = attention.tau(attention.qkv(y_TD), positions)
    by_position = tau_position(attention.tau.alpha, positions)
    torch.testing.assert_close(tau_q, units[f"tau_q_pos{start}"][0], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(tau_v, units[f"tau_v_pos{start}"][0], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(by_position, units[f"tau_pos_pos{start}"], rtol=0.0, atol=1e-6)
    out = attention(y_TD, 0, Step(positions, causal(len(y_TD)), text.rope))
    expected = units[f"attn_out_causal_pos{start}"][0]
    exact = in_float64(attention, y_TD, positions)
    torch.testing.assert_close(expected.double(), exact, rtol=0.0, atol=2e-5)
    # Each processor adds up in an order of its own. The 384 terms of a factor have sizes that add up to 37, so float32
    # leaves noise of 4e-6 in it, and it is multiplied with values of up to 8.
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=4e-5)


@pytest.mark.parametrize("config", [TINY, TINY_MOE, replace(TINY, n_kv_heads=2)], ids=["dense", "moe", "grouped"])
def test_a_position_depends_on_what_is_before_it_only(config: TextConfig) -> None:
    model, ids = TextModel(config), torch.arange(9)
    changed = ids.clone()
    changed[5] = 40
    before, after = run(model, ids), run(model, changed)
    torch.testing.assert_close(after[:5], before[:5])
    assert not torch.allclose(after[5:], before[5:], atol=1e-4)


def test_attend_gets_heads_of_every_layer_in_order() -> None:
    config = replace(TINY, n_kv_heads=2)
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def attend(layer: int, heads: Heads) -> Tensor:
        q_THD, k_THD, v_THD = heads.rotated()
        calls.append((layer, tuple(q_THD.shape), tuple(k_THD.shape), tuple(v_THD.shape)))
        return torch.zeros_like(q_THD).flatten(1)

    model = TextModel(config)
    out = model(torch.randn(5, config.dim), torch.arange(5), attend)
    assert out.shape == (5, config.dim)
    assert calls == [(layer, (5, 4, 8), (5, 2, 8), (5, 2, 8)) for layer in range(3)]


def test_the_stream_is_normalised_only_for_the_logits() -> None:
    model = TextModel(TINY)
    hidden = torch.randn(2, TINY.dim)
    normalised = torch.nn.functional.layer_norm(hidden, (TINY.dim,), model.post_ln.weight, model.post_ln.bias)
    torch.testing.assert_close(model.logits(hidden), model.lm_head(normalised))


def test_rotary_tables_stay_fp32_when_the_model_is_cast() -> None:
    model = TextModel(TINY)
    expected = model.rope.cos.clone()
    model.to(torch.bfloat16)
    assert model.wte.dtype == torch.bfloat16
    assert torch.equal(model.rope.cos, expected)


def test_rotary_tables_come_alive_when_a_meta_model_is_materialised() -> None:
    expected = TextModel(TINY).rope
    with torch.device("meta"):
        model = TextModel(TINY)
    assert model.rope.cos.is_meta
    model.to_empty(device="cpu")
    assert torch.equal(model.rope.cos, expected.cos)
    assert torch.equal(model.rope.sin, expected.sin)


def test_a_meta_model_runs_after_its_weights_are_assigned() -> None:
    source = TextModel(TINY)
    with torch.device("meta"):
        model = TextModel(TINY)
    model.load_state_dict(source.state_dict(), strict=True, assign=True)
    model.reset_buffers("cpu")
    assert torch.equal(run(model, torch.arange(4)), run(source, torch.arange(4)))


def test_rotary_tables_are_no_part_of_a_checkpoint() -> None:
    assert not [name for name in TextModel(TINY).state_dict() if name.startswith("rope")]


@pytest.mark.parametrize("config", [TINY, TINY_MOE], ids=["dense", "moe"])
def test_every_parameter_can_be_trained(config: TextConfig) -> None:
    model = TextModel(config)
    model.logits(run(model, torch.arange(20))).logsumexp(dim=1).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []


def test_bfloat16_stays_near_fp32() -> None:
    model = TextModel(TINY_MOE)
    expected = model.logits(run(model, torch.arange(10)))
    half = TextModel(TINY_MOE)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    with computing(torch.device("cpu"), torch.bfloat16):
        actual = half.logits(run(half, torch.arange(10)))
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0.0, atol=0.1)
