"""The mixture of experts against the reference."""

from __future__ import annotations

import pytest
import torch

from kestrel.kernels.moe_mlp import moe_mlp, route_top_k
from kestrel.layers.mlp import Moe

from .goldens import golden, tensors

FIRST_MOE_BLOCK = 1


def reference_mlp() -> Moe:
    mlp = golden("md3").model.text.blocks[FIRST_MOE_BLOCK].mlp
    assert isinstance(mlp, Moe)
    return mlp


@torch.inference_mode()
def test_routing_equals_the_reference() -> None:
    units, mlp = tensors("md3", "units"), reference_mlp()
    logits = mlp.router(units["moe_in"][0])
    torch.testing.assert_close(logits, units["moe_router_logits"], rtol=0.0, atol=1e-5)
    weights, ids = route_top_k(logits, mlp.experts_per_token)
    assert torch.equal(ids, units["moe_topk_ids"])
    torch.testing.assert_close(weights, units["moe_topk_weights"], rtol=0.0, atol=1e-6)


@torch.inference_mode()
def test_output_equals_the_reference() -> None:
    units = tensors("md3", "units")
    out = reference_mlp()(units["moe_in"][0])
    torch.testing.assert_close(out, units["moe_out"][0], rtol=0.0, atol=2e-5)


@torch.inference_mode()
def test_output_with_experts_restored_from_fp8_equals_the_reference() -> None:
    units, overlay, mlp = tensors("md3", "units"), tensors("md3", "moe_fp8_overlay"), reference_mlp()
    prefix = f"text_model.transformer.h.{FIRST_MOE_BLOCK}"
    up = overlay[f"{prefix}.mlp.experts.weight"].float()
    up = up * overlay[f"{prefix}.moe_quant.up_scale"][:, :, None]
    down = overlay[f"{prefix}.mlp.output_experts.weight"].float()
    down = down * overlay[f"{prefix}.moe_quant.down_scale"][:, :, None]
    x_TD = units["moe_in"][0]
    weights, ids = route_top_k(mlp.router(x_TD), mlp.experts_per_token)
    out = moe_mlp(x_TD, weights, ids, up, down)
    torch.testing.assert_close(out, units["moe_out_fp8_dequant"][0], rtol=0.0, atol=2e-5)
    assert not torch.allclose(out, units["moe_out"][0], atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_token_alone_equals_the_token_in_a_batch(count: int) -> None:
    mlp, x_TD = reference_mlp(), tensors("md3", "units")["moe_in"][0]
    together = mlp(x_TD)
    torch.testing.assert_close(mlp(x_TD[:count]), together[:count], rtol=0.0, atol=1e-5)


def test_parameters_carry_the_published_names_and_shapes() -> None:
    mlp = Moe(16, inner_dim=6, num_experts=4, experts_per_token=2)
    shapes = {name: tuple(p.shape) for name, p in mlp.named_parameters()}
    assert shapes == {
        "router.weight": (4, 16),
        "router.bias": (4,),
        "fc1.weight": (4, 12, 16),
        "fc2.weight": (4, 16, 6),
    }
