"""Two chains of a step at the same time: what they give is what they give one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN, Ops

LAYERS, DIM = 6, 512


def _steps(ops: Ops, x_TD: Tensor, weights: Tensor) -> Tensor:
    """Layers of two halves, one long and one short, each summed into the stream as a block does."""
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        y_TD = torch.tanh(x_TD)
        halves = (lambda y=y_TD, w=first: torch.relu((y @ w) @ w) @ w), (lambda y=y_TD, w=second: y @ w)
        a_TD, b_TD = ops.side_by_side(*halves)
        x_TD = x_TD + a_TD - 2 * b_TD
    return x_TD


def test_results_come_in_the_order_of_the_parts() -> None:
    one, two = PLAIN.side_by_side(lambda: torch.ones(1), lambda: torch.full((1,), 2.0))
    assert (float(one), float(two)) == (1.0, 2.0)


@pytest.mark.gpu
def test_a_captured_step_gives_what_the_parts_give_in_turn() -> None:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - needs a GPU

    weights = torch.randn(2 * LAYERS, DIM, DIM, device="cuda") / DIM**0.5
    x_TD, graph = torch.zeros(1, DIM, device="cuda"), torch.cuda.CUDAGraph()
    _steps(TRITON, x_TD, weights)
    with torch.cuda.graph(graph):
        y_TD = _steps(TRITON, x_TD, weights)
    for seed in range(20):
        x_TD.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        torch.testing.assert_close(y_TD, _steps(PLAIN, x_TD, weights), rtol=0, atol=0)
