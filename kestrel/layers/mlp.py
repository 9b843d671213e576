"""Feed-forward layers: GELU, gated SiLU, and a mixture of gated experts."""

from __future__ import annotations

from torch import Tensor, nn

from kestrel.kernels.moe_mlp import Gate
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.linear import COLUMNS, ROWS, ExpertMatrices, Fp8Rows, Linear, Rows
from kestrel.parallel.ranks import Ranks

MAX_EXACT_ROWS = 64
"""Up to so many positions float8 experts take rows as they are: reading the matrices is what takes time then."""


class Mlp(nn.Module):
    """fc2(gelu_tanh(fc1(x))), biases on both."""

    ops: Ops = PLAIN
    matrices = ("fc1", "fc2")

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(in_dim, inner_dim)
        self.fc2 = Linear(inner_dim, out_dim)

    def split(self, ranks: Ranks) -> None:
        """Keeps a share of the hidden numbers: what all ranks give is to be added up."""
        own = ranks.share(self.fc2.in_features)
        self.fc1.split_outputs(own)
        self.fc2.split_inputs(ranks, own)

    def hidden(self, x: Rows) -> Rows:
        """What fc2 takes, in its format."""
        if self.fc2.takes_fp8_rows(x):
            return Fp8Rows(*self.ops.gelu_to_fp8(self.fc1(x)))
        return self.fc1.gelu(x)

    def forward(self, x: Rows) -> Tensor:
        return self.fc2(self.hidden(x))

    def adapted(self, x: Tensor, layer: int, adapt: Adapt) -> Tensor:
        hidden_TF = adapt.product(layer, "fc1", self.fc1, x, has_gelu=True)
        return adapt.product(layer, "fc2", self.fc2, hidden_TF)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) · up(x)); gate and up are one matrix, one above the other."""

    ops: Ops = PLAIN
    matrices = ("gate_up", "down")

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * inner_dim, bias=False)
        self.down = Linear(inner_dim, dim, bias=False)

    def split(self, ranks: Ranks) -> None:
        """As of `Mlp`."""
        inner_dim = self.down.in_features
        first, end = ranks.share(inner_dim)
        self.gate_up.split_outputs((first, end), (inner_dim + first, inner_dim + end))
        self.down.split_inputs(ranks, (first, end))

    def forward(self, x: Rows) -> Tensor:
        if isinstance(x, Tensor) and x.shape[0] <= self.ops.max_gated_rows and not self.gate_up.takes_fp8_rows(x):
            return self.down(self.ops.gated_linear(x, self.gate_up.weight, self.gate_up.scale_F))
        z_TF = self.gate_up(x)
        if self.down.takes_fp8_rows(x):
            return self.down(Fp8Rows(*self.ops.silu_gate_to_fp8(z_TF)))
        return self.down(self.ops.silu_gate(z_TF))

    def adapted(self, x: Tensor, layer: int, adapt: Adapt) -> Tensor:
        hidden_TI = self.ops.silu_gate(adapt.product(layer, "gate_up", self.gate_up, x))
        return adapt.product(layer, "down", self.down, hidden_TI)


class Moe(nn.Module):
    """A router and its experts (`kestrel.kernels.moe_mlp`). `fc1` stacks the activated half over the gating half."""

    ops: Ops = PLAIN
    matrices = ("fc1", "fc2")
    gate: Gate = "gelu"
    weights_over_all = False

    def __init__(
        self,
        dim: int,
        inner_dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        gate: Gate = "gelu",
        weights_over_all: bool = False,
        router_bias: bool = True,
    ) -> None:
        """`weights_over_all`: a token's weights are its probabilities of the chosen experts, which sum to less than
        one; otherwise they are scaled to one."""
        super().__init__()
        self.experts_per_token = experts_per_token
        self.gate, self.weights_over_all = gate, weights_over_all
        self.router = Linear(dim, num_experts, bias=router_bias)
        self.fc1 = ExpertMatrices(num_experts, 2 * inner_dim, dim)
        self.fc2 = ExpertMatrices(num_experts, dim, inner_dim)

    def split(self, ranks: Ranks) -> None:
        """As of `Mlp`, in every expert: so all ranks have the same to do, whichever experts are chosen."""
        inner_dim = self.fc2.weight.shape[COLUMNS]
        first, end = ranks.share(inner_dim)
        self.fc1.split(ROWS, (first, end), (inner_dim + first, inner_dim + end))
        self.fc2.split(COLUMNS, (first, end))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self._route(self.router(x_TD))
        is_fp8 = self.fc1.scale_EF is not None
        run = self.ops.moe_mlp_fp8 if is_fp8 and x_TD.shape[0] > MAX_EXACT_ROWS else self.ops.moe_mlp
        return run(
            x_TD, weights_TK, ids_TK, self.fc1.weight, self.fc2.weight, self.fc1.scale_EF, self.fc2.scale_EF,
            gate=self.gate,
        )  # fmt: skip

    def adapted(self, x_TD: Tensor, layer: int, adapt: Adapt) -> Tensor:
        routed = self._route(adapt.product(layer, "router", self.router, x_TD))
        return adapt.experts(layer, x_TD, *routed, self.fc1, self.fc2, self.gate)

    def to_fp8(self) -> None:
        self.fc1.to_fp8()
        self.fc2.to_fp8()

    def _route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.route_top_k(logits_TE, self.experts_per_token, over_all=self.weights_over_all)
