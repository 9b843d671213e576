"""Layer normalisation, alone and together with the sum that feeds it.

    mean, var = of one row, fp32 (var over D, not D - 1)
    normed    = (x - mean) / sqrt(var + eps) · weight + bias

`add_layer_norm` makes the residual stream first: sum = x + a + b, added in fp32 and rounded once to the dtype of x.
What is normalised is the rounded sum, so that a later reader of the stream sees the same numbers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Rows normalised over their last dimension; any number of leading dimensions."""
    assert weight_D.shape == bias_D.shape == x_TD.shape[-1:]
    return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)


def add_layer_norm(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x."""
    assert x_TD.shape == delta_a_TD.shape
    total = add_deltas(x_TD, delta_a_TD, delta_b_TD)
    return total, layer_norm(total, weight_D, bias_D, eps)


def add_deltas(x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None) -> Tensor:
    """x + a + b, rounded once. Numbers finer than fp32 stay so."""
    wide = x_TD if x_TD.element_size() > 4 else x_TD.float()
    total = wide + delta_a_TD
    return (total if delta_b_TD is None else total + delta_b_TD).to(x_TD.dtype)
