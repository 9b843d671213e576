"""What adapters add to the layers of a model, position by position.

The methods that are made of `linear` and `expert` are the reference. A runtime that has many adapters on its device
overrides them with operations that do the same in one go.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kestrel.kernels.moe_mlp import Gate, gate_hidden, mix_experts
from kestrel.layers.linear import ExpertMatrices, Linear


class Adapt:
    """Adds the low-rank deltas of each position's adapter to what a matrix of the base model made of x.

    y may be changed in place; positions without an adapter keep their y bit by bit.
    """

    def linear(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        """A matrix that no adapter of the model may change keeps its y."""
        raise NotImplementedError

    def expert(self, layer: int, matrix: str, expert: int, positions_N: Tensor, x_ND: Tensor, y_NF: Tensor) -> Tensor:
        """The same for one expert; row n belongs to the batch's position `positions_N[n]`."""
        raise NotImplementedError

    def proj(self, layer: int, mixed_TD: Tensor, y_TD: Tensor, out_TD: Tensor) -> Tensor:
        """The end of attention in a parallel block: the delta reads what attention gave, or the block's norm y."""
        out_TD = self.linear(layer, "proj", mixed_TD, out_TD)
        return self.linear(layer, "proj_of_norm", y_TD, out_TD)

    def product(self, layer: int, matrix: str, base: Linear, x_TD: Tensor, *, has_gelu: bool = False) -> Tensor:
        """What a matrix of the base model makes of x, with the delta, and GELU_tanh behind both."""
        y_TF = self.linear(layer, matrix, x_TD, base(x_TD))
        return functional.gelu(y_TF, approximate="tanh") if has_gelu else y_TF

    def proj_product(self, layer: int, base: Linear, mixed_TD: Tensor, y_TD: Tensor) -> Tensor:
        """The same for `proj`."""
        return self.proj(layer, mixed_TD, y_TD, base(mixed_TD))

    def parallel_inputs(self, layer: int, y_TD: Tensor, qkv_TF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
        """qkv, and GELU_tanh of hidden."""
        hidden_TF = functional.gelu(self.linear(layer, "fc1", y_TD, hidden_TF), approximate="tanh")
        return self.linear(layer, "qkv", y_TD, qkv_TF), hidden_TF

    def parallel_outputs(
        self, layer: int, total_TD: Tensor, mixed_TD: Tensor, y_TD: Tensor, hidden_TF: Tensor
    ) -> Tensor:
        """What attention and MLP together add to the residual stream, or a part of it."""
        return self.linear(layer, "fc2", hidden_TF, self.proj(layer, mixed_TD, y_TD, total_TD))

    def experts(
        self,
        layer: int,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        fc1: ExpertMatrices,
        fc2: ExpertMatrices,
        gate: Gate,
    ) -> Tensor:
        """The mixture of what the experts of each position make of it, adapted."""

        def run_expert(expert: int, positions_N: Tensor, x_ND: Tensor) -> Tensor:
            z_NF = functional.linear(x_ND, fc1.matrix(expert, x_ND.dtype))
            hidden_NI = gate_hidden(self.expert(layer, "fc1", expert, positions_N, x_ND, z_NF), gate)
            y_ND = functional.linear(hidden_NI, fc2.matrix(expert, x_ND.dtype))
            return self.expert(layer, "fc2", expert, positions_N, hidden_NI, y_ND)

        return mix_experts(x_TD, weights_TK, ids_TK, len(fc1.weight), run_expert)
