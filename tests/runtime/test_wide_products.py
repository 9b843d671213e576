"""Products of bfloat16 on processors without instructions for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.runtime import wide_products
from kestrel.runtime.wide_products import WideProducts, computing, fast_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (functional.linear, (numbers(5, 48), numbers(7, 48), numbers(7))),
    "attention": (functional.scaled_dot_product_attention, (numbers(1, 2, 9, 16),) * 3),
    "@": (lambda a, b: a @ b, (numbers(5, 48), numbers(48, 3))),
    "matmul": (torch.matmul, (numbers(2, 5, 48), numbers(48, 3))),
    "convolution": (functional.conv2d, (numbers(1, 4, 9, 9), numbers(6, 4, 3, 3), numbers(6))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_computed_in_float32_and_rounded_once(name: str) -> None:
    product, operands = PRODUCTS[name]
    with WideProducts():
        ours = product(*operands)
    assert ours.dtype == BF16
    assert torch.equal(ours, product(*(operand.float() for operand in operands)).to(BF16))


def test_masks_and_options_come_through() -> None:
    q, seen = numbers(1, 2, 9, 16), torch.ones(9, 9, dtype=torch.bool).tril()
    with WideProducts():
        ours = functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)
    wide = functional.scaled_dot_product_attention(q.float(), q.float(), q.float(), is_causal=True)
    assert torch.allclose(ours.float(), wide, atol=0.01)


def test_layers_of_a_model_are_products_too() -> None:
    layer, x = nn.Linear(48, 7, dtype=BF16), numbers(5, 48)
    with WideProducts():
        ours = layer(x)
    assert torch.equal(ours, functional.linear(x.float(), layer.weight.float(), layer.bias.float()).to(BF16))


@torch.inference_mode()
def test_attention_of_several_heads_gives_no_weights_when_none_are_asked_for() -> None:
    attention, x = nn.MultiheadAttention(48, 4, batch_first=True, dtype=BF16).eval(), numbers(1, 9, 48)
    with WideProducts():
        ours, weights = attention(x, x, x, need_weights=False)
    wide, _ = attention.float()(x.float(), x.float(), x.float(), need_weights=False)
    assert weights is None
    assert ours.dtype == BF16
    torch.testing.assert_close(ours, wide.to(BF16))


def test_gradients_come_back_through_wide_products() -> None:
    layer, x = nn.Linear(48, 7, dtype=BF16), numbers(5, 48)
    with WideProducts():
        loss = layer(x).float().square().sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == BF16


def test_other_operations_and_other_numbers_are_left_alone() -> None:
    x = numbers(5, 48)
    with WideProducts():
        assert torch.equal(x + x, (x.float() + x.float()).to(BF16))
        assert (x.float() @ x.float().T).dtype == torch.float32


def test_only_bfloat16_on_a_slow_processor_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "has_fast_bfloat16", lambda: False)
    assert fast_dtype(CPU, BF16) == torch.float32
    assert isinstance(computing(CPU, BF16), WideProducts)
    assert fast_dtype(CUDA, BF16) == BF16
    assert fast_dtype(CPU, torch.float16) == torch.float16
    assert not isinstance(computing(CPU, torch.float32), WideProducts)


def test_a_processor_that_has_the_instructions_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "has_fast_bfloat16", lambda: True)
    assert fast_dtype(CPU, BF16) == BF16
    assert not isinstance(computing(CPU, BF16), WideProducts)
