"""The mixture-of-experts MLP of Moondream 3."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.moe_mlp import gate_hidden, mix_experts, moe_mlp, route_top_k
from kestrel.models.contract import Adapt
from kestrel.models.layers import normal_parameter
from kestrel.moondream.config import MoeConfig


class ExpertMatrices(nn.Module):
    """One bias-free matrix per expert: `weight` [num_experts, out_dim, in_dim]."""

    def __init__(self, num_experts: int, out_dim: int, in_dim: int) -> None:
        super().__init__()
        self.weight = normal_parameter(num_experts, out_dim, in_dim, std=in_dim**-0.5)


class MoeMlp(nn.Module):
    """A router and its experts. `fc1` stacks the activated half over the gating half."""

    def __init__(self, dim: int, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(dim, config.num_experts)
        self.fc1 = ExpertMatrices(config.num_experts, 2 * config.expert_inner_dim, dim)
        self.fc2 = ExpertMatrices(config.num_experts, dim, config.expert_inner_dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = route_top_k(self.router(x_TD), self.experts_per_token)
        return moe_mlp(x_TD, weights_TK, ids_TK, self.fc1.weight, self.fc2.weight)

    def adapted(self, x_TD: Tensor, layer: int, adapt: Adapt) -> Tensor:
        """The router is the base model's own; what an expert makes of a position is adapted."""
        weights_TK, ids_TK = route_top_k(self.router(x_TD), self.experts_per_token)

        def run_expert(expert: int, positions_N: Tensor, x_ND: Tensor) -> Tensor:
            z_NF = adapt.expert(
                layer, "fc1", expert, positions_N, x_ND, functional.linear(x_ND, self.fc1.weight[expert])
            )
            hidden_NI = gate_hidden(z_NF)
            y_ND = functional.linear(hidden_NI, self.fc2.weight[expert])
            return adapt.expert(layer, "fc2", expert, positions_N, hidden_NI, y_ND)

        return mix_experts(x_TD, weights_TK, ids_TK, self.fc1.weight.shape[0], run_expert)
