"""The text model: a flat run of positions through parallel-residual blocks.

There is no batch dimension: T counts positions of any number of sequences. Who attends to whom is the business of the
`Attend` callable, which also owns the stored keys and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.rope import apply_rope, rope_tables
from kestrel.kernels.tau import scale_heads, tau_factors
from kestrel.models.contract import Adapt, Attend
from kestrel.models.layers import GeluMlp, normal_parameter
from kestrel.moondream.config import TextConfig
from kestrel.moondream.moe import MoeMlp


class RotaryTables(nn.Module):
    """cos and sin by position. They stay fp32 and are computed anew wherever the module moves."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self._shape = (config.max_context, config.rotary_dim, config.rope_theta)
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        if torch.device(device).type == "meta":
            max_context, rotary_dim, _ = self._shape
            self.cos, self.sin = torch.empty(2, max_context, rotary_dim // 2, device=device)
        else:
            self.cos, self.sin = rope_tables(*self._shape, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTables:
        # `fn` may cast to half precision or leave memory uninitialised; only its device counts here.
        super()._apply(fn, recurse)
        self.reset_buffers(self.cos.device)
        return self

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions_T], self.sin[positions_T]


class TauScaling(nn.Module):
    """Learned scales of queries and values (Moondream 3)."""

    def __init__(self, n_heads: int, qkv_dim: int) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.zeros(n_heads, qkv_dim))
        self.wv = nn.Parameter(torch.zeros(n_heads, qkv_dim))
        self.alpha = nn.Parameter(torch.zeros(n_heads))

    def forward(self, qkv_TF: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return tau_factors(qkv_TF, self.wq, self.wv, self.alpha, positions_T)


class TextAttention(nn.Module):
    """Fused projection, tau scaling, rotation; the attention itself is `attend`."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.head_counts = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
        self.qkv = nn.Linear(config.dim, config.qkv_dim)
        self.proj = nn.Linear(config.n_heads * config.head_dim, config.dim)
        self.tau = TauScaling(config.n_heads, config.qkv_dim) if config.tau_attn else None

    def forward(
        self,
        y_TD: Tensor,
        positions_T: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer: int,
        attend: Attend,
        adapt: Adapt | None = None,
    ) -> Tensor:
        qkv_TF = self.qkv(y_TD)
        if adapt is not None:
            qkv_TF = adapt.linear(layer, "qkv", y_TD, qkv_TF)
        heads = qkv_TF.view(y_TD.shape[0], -1, self.head_dim)
        q_THD, k_THD, v_THD = heads.split(self.head_counts, dim=1)
        if self.tau is not None:
            tau_q, tau_v = self.tau(qkv_TF, positions_T)
            q_THD, v_THD = scale_heads(q_THD, tau_q), scale_heads(v_THD, tau_v)
        cos, sin = rotation
        out_THD = attend(layer, apply_rope(q_THD, cos, sin), apply_rope(k_THD, cos, sin), v_THD)
        out_TD = out_THD.flatten(1)
        projected_TD = self.proj(out_TD)
        if adapt is not None:
            projected_TD = adapt.linear(layer, "proj", out_TD, projected_TD)
            projected_TD = adapt.linear(layer, "proj_of_norm", y_TD, projected_TD)
        return projected_TD


class TextMlp(GeluMlp):
    """The dense feed-forward part, whose matrices adapters may change."""

    def adapted(self, x_TD: Tensor, layer: int, adapt: Adapt) -> Tensor:
        hidden_TF = functional.gelu(adapt.linear(layer, "fc1", x_TD, self.fc1(x_TD)), approximate="tanh")
        return adapt.linear(layer, "fc2", hidden_TF, self.fc2(hidden_TF))


class TextBlock(nn.Module):
    """x + Attn(y) + MLP(y), y = LN(x)."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln = nn.LayerNorm(config.dim)
        self.attn = TextAttention(config)
        if config.moe is not None and layer >= config.moe.start_layer:
            self.mlp = MoeMlp(config.dim, config.moe)
        else:
            self.mlp = TextMlp(config.dim, config.ff_dim, config.dim)

    def forward(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
        adapt: Adapt | None = None,
    ) -> Tensor:
        y_TD = self.ln(x_TD)
        mixed_TD = self.attn(y_TD, positions_T, rotation, self.layer, attend, adapt)
        said_TD = self.mlp(y_TD) if adapt is None else self.mlp.adapted(y_TD, self.layer, adapt)
        return x_TD + mixed_TD + said_TD


class TextModel(nn.Module):
    """Embedding, blocks and output head; parameters carry the names of the published checkpoints."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.wte = normal_parameter(config.vocab_size, config.dim, std=0.02)
        self.blocks = nn.ModuleList(TextBlock(config, layer) for layer in range(config.n_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size)
        self.rope = RotaryTables(config)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what no checkpoint holds; needed after `load_state_dict(assign=True)` on a meta model."""
        self.rope.reset_buffers(device)

    def embed(self, ids_T: Tensor) -> Tensor:
        return functional.embedding(ids_T, self.wte)

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        """The residual stream after the last block, not normalised (region decoders read it as it is)."""
        assert x_TD.ndim == 2
        assert positions_T.shape == x_TD.shape[:1]
        rotation = self.rope(positions_T)
        for block in self.blocks:
            x_TD = block(x_TD, positions_T, rotation, attend, adapt)
        return x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.lm_head(self.post_ln(hidden_TD))
