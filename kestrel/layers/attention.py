"""Attention up to the cache: fused projection, norms and scales of heads, rotation.

Who attends to whom, and where keys and values are kept, is the business of `Attend`, which is given `Heads`: either it
takes rotated queries, keys and values apart, or it lets one operation rotate them and put keys and values in their
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.ops import PLAIN, Ops
from kestrel.kernels.rope_scaling import RopeScaling
from kestrel.kernels.rotary import apply_rope, rope_tables, scale_heads, tau_factors, tau_position
from kestrel.layers.adapt import Adapt
from kestrel.layers.linear import COLUMNS, Linear, Rows, keep_part
from kestrel.layers.norm import RmsNorm
from kestrel.parallel.ranks import ALONE, Part, Range, Ranks


class Rope(nn.Module):
    """cos and sin by position. They stay fp32 and are computed anew wherever the module moves."""

    cos: Tensor
    sin: Tensor

    def __init__(self, max_context: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self._shape = (max_context, rotary_dim, theta)
        self._scaling = scaling
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device | str) -> None:
        if torch.device(device).type == "meta":
            max_context, rotary_dim, _ = self._shape
            self.cos, self.sin = torch.empty(2, max_context, rotary_dim // 2, device=device)
        else:
            self.cos, self.sin = rope_tables(*self._shape, device=device, scaling=self._scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        # `fn` may cast to half precision or leave memory uninitialised; only its device counts here.
        super()._apply(fn, recurse)
        self.reset_buffers(self.cos.device)
        return self

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions_T], self.sin[positions_T]


class Attend(Protocol):
    """Stores the keys and values of one layer's new positions and attends over everything stored for their rows."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """[T, heads · head_dim]."""
        ...


@dataclass(slots=True)
class Step:
    """What all layers of one forward pass share."""

    positions_T: Tensor
    attend: Attend
    rope: Rope | None = None
    """None: the model has no rotary positions."""
    adapt: Adapt | None = None
    _rotation: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def rotation(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the positions, looked up once."""
        if self._rotation is None and self.rope is not None:
            self._rotation = self.rope(self.positions_T)
        return self._rotation


class Tau(nn.Module):
    """Learned scales of queries and values (Moondream 3)."""

    ops: Ops = PLAIN
    ranks: Ranks = ALONE

    def __init__(self, n_heads: int, qkv_dim: int) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.zeros(n_heads, qkv_dim))
        self.wv = nn.Parameter(torch.zeros(n_heads, qkv_dim))
        self.alpha = nn.Parameter(torch.zeros(n_heads))
        self._stacked_2HF: Tensor | None = None

    def forward(self, qkv_TF: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Factors [T, heads] of queries and of values, fp32."""
        if not self.ranks.is_alone:
            return self._of_all_ranks(qkv_TF, positions_T)
        if self._stacked_2HF is None:
            return tau_factors(qkv_TF, self.wq, self.wv, self.alpha, positions_T)
        return self.ops.tau_factors(qkv_TF, self._stacked_2HF, self.alpha, positions_T)

    def _of_all_ranks(self, qkv_TF: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """A head's scales depend on all heads: each rank multiplies what it has of them, for everybody."""
        w_2HF = torch.cat((self.wq, self.wv)) if self._stacked_2HF is None else self._stacked_2HF
        sums_T2H = self.ranks.sum(functional.linear(functional.gelu(qkv_TF), w_2HF).float()).unflatten(1, (2, -1))
        first, end = self.ranks.share(len(self.wq))
        factors_T2H = torch.tanh(sums_T2H[:, :, first:end]) + tau_position(self.alpha, positions_T)[:, None]
        tau_q, tau_v = factors_T2H.unbind(1)
        return tau_q.contiguous(), tau_v.contiguous()

    def split(self, ranks: Ranks, *ranges: Range) -> None:
        """`ranges`: what the rank has of the fused projection."""
        n_heads, qkv_dim = self.wq.shape
        for name in ("wq", "wv"):
            keep_part(self, name, Part(COLUMNS, ranges, qkv_dim))
        keep_part(self, "alpha", Part(COLUMNS, (ranks.share(n_heads),), n_heads))
        self.ranks = ranks

    def join(self) -> None:
        """The two matrices one above the other, for one product."""
        self._stacked_2HF = torch.cat((self.wq.data, self.wv.data))
        self.wq.data, self.wv.data = self._stacked_2HF.chunk(2)


class Attention(nn.Module):
    """Grouped heads. The product with `qkv` is [q heads | k heads | v heads]."""

    ops: Ops = PLAIN

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        has_tau: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        """`qk_norm_eps`: queries and keys go through a norm of their own, head by head."""
        super().__init__()
        self.head_dim = head_dim
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        qkv_dim = (n_heads + 2 * n_kv_heads) * head_dim
        self.qkv = Linear(dim, qkv_dim, bias=qkv_bias)
        self.proj = Linear(n_heads * head_dim, dim, bias=proj_bias)
        self.tau = Tau(n_heads, qkv_dim) if has_tau else None
        self.q_norm = None if qk_norm_eps is None else RmsNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RmsNorm(head_dim, qk_norm_eps)

    def split(self, ranks: Ranks) -> None:
        """Keeps a share of the heads: what all ranks give is to be added up. Where heads of keys and values are fewer
        than ranks, several have the same one."""
        heads = [ranks.share(self.n_heads), *[ranks.share(self.n_kv_heads)] * 2]
        starts = [0, self.n_heads, self.n_heads + self.n_kv_heads]
        dim = self.head_dim
        ranges = [((at + first) * dim, (at + end) * dim) for at, (first, end) in zip(starts, heads, strict=True)]
        self.qkv.split_outputs(*ranges)
        self.proj.split_inputs(ranks, ranges[0])
        if self.tau is not None:
            self.tau.split(ranks, *ranges)
        self.n_heads, self.n_kv_heads = (end - first for first, end in heads[:2])

    def mix(self, qkv_TF: Tensor, layer: int, step: Step) -> Tensor:
        """From the fused projection to what attention leaves, [T, heads · head_dim]."""
        return step.attend(layer, Heads(self, step, _qkv_TF=qkv_TF))

    def mix_of(self, y: Rows, layer: int, step: Step, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """The same from what the projection reads, or from what an RMS norm before it reads (a handful of rows)."""
        return step.attend(layer, Heads(self, step, y, norm))

    def forward(self, y: Rows, layer: int, step: Step, wanted_N: Tensor | None = None) -> Tensor:
        """Of the wanted positions, or of all. Without the deltas of adapters: blocks know which of their inputs those
        read."""
        mixed_TD = self.mix_of(y, layer, step)
        return self.proj(mixed_TD if wanted_N is None else mixed_TD[wanted_N])


@dataclass(slots=True)
class Heads:
    """Queries, keys and values of a step's new positions: what the fused projection gave, or what it is to read."""

    attention: Attention
    step: Step
    y: Rows | None = None
    norm: tuple[Tensor, float] | None = None
    """Of y, before the projection."""
    _qkv_TF: Tensor | None = None

    @property
    def qkv_TF(self) -> Tensor:
        qkv_TF, qkv = self._qkv_TF, self.attention.qkv
        if qkv_TF is None:
            assert self.y is not None
            if self.norm is None:
                qkv_TF = qkv(self.y)
            else:
                assert isinstance(self.y, Tensor)
                qkv_TF = qkv.of_norm(self.y, self.norm)
            self._qkv_TF = qkv_TF
        return qkv_TF

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], ready for attention. Gradients flow through it."""
        own = self.attention
        heads = self.qkv_TF.view(self.qkv_TF.shape[0], -1, own.head_dim)
        q_THD, k_THD, v_THD = heads.split_with_sizes([own.n_heads, own.n_kv_heads, own.n_kv_heads], dim=1)
        if own.tau is not None:
            tau_q, tau_v = own.tau(self.qkv_TF, self.step.positions_T)
            q_THD, v_THD = scale_heads(q_THD, tau_q), scale_heads(v_THD, tau_v)
        if own.q_norm is not None and own.k_norm is not None:
            q_THD, k_THD = own.q_norm(q_THD), own.k_norm(k_THD)
        rotation = self.step.rotation
        if rotation is not None:
            q_THD, k_THD = apply_rope(q_THD, *rotation), apply_rope(k_THD, *rotation)
        return q_THD, k_THD, v_THD

    def stored(self, slots_T: Tensor, caches: tuple[Tensor, Tensor], scales: tuple[float, float]) -> Tensor:
        """q as of `rotated`; keys and values are in their slots afterwards. One operation, together with the
        projection where that is possible."""
        own, rope = self.attention, self.step.rope
        tables = (None, None) if rope is None else (rope.cos, rope.sin)
        if self._can_project:
            qkv = own.qkv
            return own.ops.project_and_store(
                self.y, qkv.weight, qkv.bias, qkv.scale_F, self.norm, own.n_heads, own.n_kv_heads, *tables,
                self.step.positions_T, slots_T, *caches, *scales,
            )  # fmt: skip
        tau = None if own.tau is None else own.tau(self.qkv_TF, self.step.positions_T)
        norms = None
        if own.q_norm is not None and own.k_norm is not None:
            norms = (own.q_norm.weight, own.k_norm.weight, own.q_norm.eps)
        return own.ops.rotate_and_store(
            self.qkv_TF, own.n_heads, own.n_kv_heads, *tables, self.step.positions_T, slots_T, *caches, tau, *scales,
            norms=norms,
        )  # fmt: skip

    @property
    def _can_project(self) -> bool:
        """A handful of rows, and nothing between projection and rotation that reads more than pairs of numbers."""
        own = self.attention
        return self.y is not None and own.tau is None and own.q_norm is None and own.qkv.is_small(self.y)
