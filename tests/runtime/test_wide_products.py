"""Products of bfloat16 on processors that multiply them slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kestrel.runtime import device
from kestrel.runtime.device import PRODUCTS, WideProducts, computing, fast_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


class Watching(TorchFunctionMode):
    """What the functions inside are called with: pairs of a function and the type of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Callable[..., Any], torch.dtype]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        self.seen += [(func, one.dtype) for one in tensors[:1]]
        return func(*args, **kwargs)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16)


A, B, BATCH_A, BATCH_B = numbers(5, 48), numbers(48, 3), numbers(2, 5, 48), numbers(2, 48, 3)
OPERANDS: dict[Callable[..., Any], tuple[Any, ...]] = {
    functional.linear: (A, numbers(7, 48), numbers(7)),
    functional.scaled_dot_product_attention: (numbers(1, 2, 9, 16),) * 3,
    functional.conv2d: (numbers(1, 4, 9, 9), numbers(6, 4, 3, 3), numbers(6)),
    functional.conv_transpose2d: (numbers(1, 4, 9, 9), numbers(4, 6, 2, 2), numbers(6)),
    torch.einsum: ("ab,bc->ac", A, B),
    **{getattr(place, name): operands for place in (torch, Tensor) for name, operands in {
        "matmul": (BATCH_A, B), "mm": (A, B), "bmm": (BATCH_A, BATCH_B), "addmm": (numbers(5, 3), A, B),
        "baddbmm": (numbers(2, 5, 3), BATCH_A, BATCH_B),
    }.items()},
}  # fmt: skip


def test_every_product_is_tried_here() -> None:
    assert set(OPERANDS) == PRODUCTS - {functional.multi_head_attention_forward}


@pytest.mark.parametrize("product", OPERANDS, ids=lambda product: getattr(product, "__qualname__", str(product)))
def test_a_product_is_computed_in_float32_and_rounded_once(product: Callable[..., Tensor]) -> None:
    operands = OPERANDS[product]
    with Watching() as watching, WideProducts():
        ours = product(*operands)
    assert (product, torch.float32) in watching.seen
    assert (product, BF16) not in watching.seen
    wide = product(*(one.float() if isinstance(one, Tensor) else one for one in operands))
    assert ours.dtype == BF16
    assert torch.equal(ours, wide.to(BF16))


def test_the_operator_is_a_product_too() -> None:
    with Watching() as watching, WideProducts():
        assert (A @ B).dtype == BF16
    assert (Tensor.matmul, torch.float32) in watching.seen


@torch.inference_mode()
def test_attention_of_several_heads_is_wide_and_gives_no_weights_when_none_are_asked_for() -> None:
    attention, x = nn.MultiheadAttention(48, 4, batch_first=True, dtype=BF16).eval(), numbers(1, 9, 48)
    with Watching() as watching, WideProducts():
        ours, weights = attention(x, x, x, need_weights=False)
    assert (functional.multi_head_attention_forward, torch.float32) in watching.seen
    assert not {func for func, dtype in watching.seen if dtype == BF16} & PRODUCTS
    wide, _ = attention.float()(x.float(), x.float(), x.float(), need_weights=False)
    assert weights is None
    assert ours.dtype == BF16
    torch.testing.assert_close(ours, wide.to(BF16))


def test_masks_options_and_names_come_through() -> None:
    q, seen = numbers(1, 2, 9, 16), torch.ones(9, 9, dtype=torch.bool).tril()
    with Watching() as watching, WideProducts():
        ours = functional.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=seen)
    assert (functional.scaled_dot_product_attention, torch.float32) in watching.seen
    wide = functional.scaled_dot_product_attention(q.float(), q.float(), q.float(), is_causal=True)
    assert torch.allclose(ours.float(), wide, atol=0.01)


def test_layers_of_a_model_and_their_gradients_are_wide_too() -> None:
    layer, x = nn.Linear(48, 7, dtype=BF16), numbers(5, 48)
    with Watching() as watching, WideProducts():
        loss = layer(x).float().square().sum()
    assert (functional.linear, torch.float32) in watching.seen
    loss.backward()
    exact = nn.Linear(48, 7)
    exact.load_state_dict(layer.state_dict())
    exact(x.float()).square().sum().backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.float(), exact.weight.grad, rtol=0.02, atol=0.05)


def test_other_operations_and_other_numbers_are_left_alone() -> None:
    x, y = numbers(5, 48), torch.ones(5, 48)
    with Watching() as watching, WideProducts():
        torch.add(x, x)
        torch.mm(y, y.T)
    assert (torch.add, BF16) in watching.seen
    assert (torch.mm, torch.float32) in watching.seen
    assert not any(func == Tensor.to for func, _ in watching.seen)


def test_only_bfloat16_on_a_slow_processor_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: False)
    assert fast_dtype(CPU, BF16) == torch.float32
    assert isinstance(computing(CPU, BF16), WideProducts)
    assert fast_dtype(CUDA, BF16) == BF16
    assert fast_dtype(CPU, torch.float16) == torch.float16
    assert not isinstance(computing(CPU, torch.float32), WideProducts)


def test_a_processor_that_has_the_instructions_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: True)
    assert fast_dtype(CPU, BF16) == BF16
    assert not isinstance(computing(CPU, BF16), WideProducts)
