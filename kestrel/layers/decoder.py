"""A text decoder: embedding, blocks, last norm and output head.

There is no batch dimension: T counts positions of any number of sequences. Who attends to whom is the business of the
`Attend` that a step brings, which also owns the stored keys and values.

Blocks are parallel (Moondream) or sequential (everybody else). A block is given the residual stream and what is still
to be added to it, and hands both on: its first norm makes the sum, in one operation, in the number format that its
first matrix wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.fp8 import FEWEST_ROWS
from kestrel.kernels.moe_mlp import Work
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend, Attention, Rope, Step
from kestrel.layers.linear import (
    ExpertMatrices,
    Fp8Rows,
    Linear,
    normal_parameter,
    use_ops,
)
from kestrel.layers.mlp import GatedMlp, Mlp, Moe
from kestrel.layers.norm import LayerNorm, Norm, Pending, RmsNorm
from kestrel.parallel.ranks import ALONE, Part, Ranks


class ParallelBlock(nn.Module):
    """x + attention(y) + MLP(y), y = norm(x).

    Both halves read the same norm and end in the same sum. Few positions leave a GPU waiting for memory and for the
    kernel before: there (`Ops.max_forked_rows`) the halves run at the same time.
    """

    ops: Ops = PLAIN
    ranks: Ranks = ALONE

    def __init__(self, layer: int, norm: LayerNorm, attention: Attention, mlp: Mlp | Moe) -> None:
        super().__init__()
        self.layer = layer
        self.ln, self.attn, self.mlp = norm, attention, mlp
        if isinstance(mlp, Mlp):
            mlp.fc2.is_beside = True

    @property
    def has_experts(self) -> bool:
        return isinstance(self.mlp, Moe)

    def split(self, ranks: Ranks) -> None:
        """Keeps one rank's share of both halves, which end in one sum over all ranks."""
        self.attn.split(ranks)
        self.mlp.split(ranks)
        self.ranks = ranks

    def join(self) -> None:
        """Puts the two matrices of tau side by side. Others stay apart: halves share no product."""
        if self.attn.tau is not None:
            self.attn.tau.join()

    def to_fp8(self, *, experts_only: bool = False) -> None:
        """The matrices of a dense block, or the experts alone."""
        if isinstance(self.mlp, Moe):
            self.mlp.to_fp8()
            return
        for matrix in (self.attn.qkv, self.attn.proj, self.mlp.fc1, self.mlp.fc2):
            matrix.to_fp8()

    def forward(
        self, x_TD: Tensor, pending: Pending, step: Step, wanted_N: Tensor | None = None
    ) -> tuple[Tensor, Pending]:
        """(residual stream, what is still to be added to it): first before the block, then after it, there of the
        wanted positions alone."""
        adapt, is_dense = step.adapt, isinstance(self.mlp, Mlp)
        to_fp8 = adapt is None and is_dense and self.attn.qkv.takes_fp8_rows(x_TD)
        x_TD, y = self.ln.of_sum(x_TD, pending, to_fp8=to_fp8)
        if adapt is None:
            return self._forward_halves(x_TD, y, step, wanted_N)
        assert not isinstance(y, Fp8Rows)
        takes_many = is_dense and not (self._is_forked(x_TD) or self.attn.qkv.is_small(y))
        run = self._adapted_dense if takes_many else self._adapted_halves
        return _wanted(wanted_N, x_TD, self.ranks.sums(*run(y, step, adapt)))

    def _forward_halves(
        self, x_TD: Tensor, y: Tensor | Fp8Rows, step: Step, wanted_N: Tensor | None
    ) -> tuple[Tensor, Pending]:
        if wanted_N is None and self._is_forked(x_TD):
            halves = self._side_by_side(
                lambda: self.attn(y, self.layer, step), lambda: self.mlp(y), is_attention_first=x_TD.shape[0] > 1
            )
            return x_TD, self.ranks.sums(*halves)
        a_TD = self.attn(y, self.layer, step, wanted_N)
        if wanted_N is not None:
            x_TD, y = x_TD[wanted_N], y[wanted_N]
        return x_TD, self.ranks.sums(a_TD, self.mlp(y))

    def _is_forked(self, x_TD: Tensor) -> bool:
        return x_TD.shape[0] <= self.ops.max_forked_rows

    def _side_by_side(self, attention: Work, mlp: Work, *, is_attention_first: bool) -> tuple[Tensor, Tensor]:
        """What comes second for `ops` is preferred where both want the GPU. Behind attention waits another product; but
        of a single row the MLP first was faster, and of a few with adapters it may be (the log, 2026-11-19)."""
        if not is_attention_first:
            return self.ops.side_by_side(attention, mlp)
        m_TD, a_TD = self.ops.side_by_side(mlp, attention)
        return a_TD, m_TD

    def _adapted_halves(self, y_TD: Tensor, step: Step, adapt: Adapt) -> Pending:
        def attention() -> Tensor:
            qkv_TF = adapt.product(self.layer, "qkv", self.attn.qkv, y_TD)
            mixed_TD = self.attn.mix(qkv_TF, self.layer, step)
            return adapt.proj_product(self.layer, self.attn.proj, mixed_TD, self.ranks.columns(y_TD))

        if self._is_forked(y_TD):
            is_few = self.attn.qkv.is_small(y_TD)
            mlp = partial(self.mlp.adapted, y_TD, self.layer, adapt)
            return self._side_by_side(attention, mlp, is_attention_first=not is_few)
        return attention(), self.mlp.adapted(y_TD, self.layer, adapt)

    def _adapted_dense(self, y_TD: Tensor, step: Step, adapt: Adapt) -> Pending:
        """With many positions the deltas of both halves are added in one operation."""
        assert isinstance(self.mlp, Mlp)
        rows = self.attn.qkv.rows(y_TD)
        qkv_TF, hidden_TF = adapt.parallel_inputs(self.layer, y_TD, self.attn.qkv(rows), self.mlp.fc1(rows))
        mixed_TD = self.attn.mix(qkv_TF, self.layer, step)
        a_TD = adapt.parallel_outputs(
            self.layer, self.attn.proj(mixed_TD), mixed_TD, self.ranks.columns(y_TD), hidden_TF
        )
        return a_TD, self.mlp.fc2(hidden_TF)


class SequentialBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    ops: Ops = PLAIN
    ranks: Ranks = ALONE

    def __init__(
        self, layer: int, attn_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: Mlp | GatedMlp | Moe
    ) -> None:
        super().__init__()
        self.layer = layer
        self.ln1, self.attn, self.ln2, self.mlp = attn_norm, attention, mlp_norm, mlp

    @property
    def has_experts(self) -> bool:
        return isinstance(self.mlp, Moe)

    def split(self, ranks: Ranks) -> None:
        """Keeps one rank's share of both halves; behind each comes a sum over all ranks."""
        self.attn.split(ranks)
        self.mlp.split(ranks)
        self.ranks = ranks

    def join(self) -> None:
        """Nothing: the halves follow each other."""

    def to_fp8(self, *, experts_only: bool = False) -> None:
        """The router stays as it is."""
        attention = () if experts_only else (self.attn.qkv, self.attn.proj)
        for matrix in (*attention, *(getattr(self.mlp, name) for name in self.mlp.matrices)):
            matrix.to_fp8()

    def forward(
        self, x_TD: Tensor, pending: Pending, step: Step, wanted_N: Tensor | None = None
    ) -> tuple[Tensor, Pending]:
        """(residual stream, what is still to be added to it): first before the block, then after it, there of the
        wanted positions alone."""
        adapt = step.adapt
        if self._is_fusible and adapt is None and not pending and self.attn.qkv.is_small(x_TD):
            return _wanted(wanted_N, self._forward_small(x_TD, step), ())
        to_fp8 = adapt is None and self.attn.qkv.takes_fp8_rows(x_TD)
        x_TD, y = self.ln1.of_sum(x_TD, pending, to_fp8=to_fp8)
        if adapt is None:
            a_TD = self.attn(y, self.layer, step, wanted_N)
            if wanted_N is not None:
                x_TD = x_TD[wanted_N]
            to_fp8 = self.attn.qkv.takes_fp8_rows(x_TD) and not self.has_experts
            x_TD, y = self.ln2.of_sum(x_TD, self.ranks.sums(a_TD), to_fp8=to_fp8)
            return x_TD, self.ranks.sums(self.mlp(y))
        assert not isinstance(y, Fp8Rows)
        mixed_TD = self.attn.mix(adapt.product(self.layer, "qkv", self.attn.qkv, y), self.layer, step)
        a_TD = adapt.product(self.layer, "proj", self.attn.proj, mixed_TD)
        x_TD, y = self.ln2.of_sum(x_TD, self.ranks.sums(a_TD))
        assert not isinstance(y, Fp8Rows)
        return _wanted(wanted_N, x_TD, self.ranks.sums(self.mlp.adapted(y, self.layer, adapt)))

    @property
    def _is_fusible(self) -> bool:
        """With other ranks, their sum comes between a product and the norm behind it."""
        norms_fit = isinstance(self.ln1, RmsNorm) and isinstance(self.ln2, RmsNorm)
        return isinstance(self.mlp, GatedMlp) and norms_fit and self.ranks.is_alone

    def _forward_small(self, x_TD: Tensor, step: Step) -> Tensor:
        """A handful of positions: norms, gate and sums belong to the products before or behind them."""
        assert isinstance(self.mlp, GatedMlp)
        ops, proj, gate_up, down = self.ops, self.attn.proj, self.mlp.gate_up, self.mlp.down
        mixed_TD = self.attn.mix_of(x_TD, self.layer, step, (self.ln1.weight, self.ln1.eps))
        x_TD = ops.small_linear(mixed_TD, proj.weight, proj.bias, residual_MF=x_TD, scale_F=proj.scale_F)
        hidden_TI = ops.gated_linear(x_TD, gate_up.weight, gate_up.scale_F, (self.ln2.weight, self.ln2.eps))
        return ops.small_linear(hidden_TI, down.weight, residual_MF=x_TD, scale_F=down.scale_F)


def _wanted(wanted_N: Tensor | None, x_TD: Tensor, pending: Pending) -> tuple[Tensor, Pending]:
    """Of the wanted positions, where a block has computed all."""
    return (x_TD, pending) if wanted_N is None else (x_TD[wanted_N], tuple(part_TD[wanted_N] for part_TD in pending))


def _matrices(block: ParallelBlock | SequentialBlock) -> dict[str, Linear | ExpertMatrices]:
    """By the names that `Adapt` knows them under; the router is not among them."""
    own = {name: getattr(block.mlp, name) for name in block.mlp.matrices}
    return {"qkv": block.attn.qkv, "proj": block.attn.proj, **own}


# ---------------------------------------------------------------------- the decoder


class TextDecoder(nn.Module):
    ops: Ops = PLAIN
    ranks: Ranks = ALONE
    _head_ranks: Ranks = ALONE

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        blocks: Iterable[ParallelBlock | SequentialBlock],
        norm: Norm,
        rope: Rope | None,
        *,
        head_bias: bool = False,
        is_tied: bool = False,
    ) -> None:
        """`is_tied`: the output head is the embedding."""
        super().__init__()
        self.wte = normal_parameter(vocab_size, dim, std=0.02)
        self.blocks = nn.ModuleList(blocks)
        self.post_ln = norm
        self.lm_head = Linear(dim, vocab_size, bias=head_bias)
        self.rope = rope
        self._is_tied = is_tied
        if is_tied:
            self.lm_head.weight = self.wte
        self.is_fused = False
        self.quantization = "none"

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what no checkpoint holds, and ties the head again; call it once a meta model has its parameters."""
        if self.rope is not None:
            self.rope.reset_buffers(device)
        self._tie()

    def _tie(self) -> None:
        if self._is_tied:
            first, end = self._head_ranks.share(len(self.wte))
            is_whole = self._head_ranks.is_alone
            self.lm_head.weight = self.wte if is_whole else nn.Parameter(self.wte.data[first:end], requires_grad=False)

    def split(self, ranks: Ranks) -> None:
        """Keeps one rank's part of a model that is whole: of its blocks, and of the head where its rows can be shared
        evenly. To be called once, before the model is loaded, or at least before it is fused or quantised."""
        if ranks.is_alone:
            return
        for block in self._blocks():
            block.split(ranks)
        self.ranks = ranks
        if self.lm_head.out_features % ranks.size == 0:
            self._head_ranks = ranks
            if not self._is_tied:
                self.lm_head.split_outputs(ranks.share(self.lm_head.out_features))
            elif not self.wte.is_meta:
                self._tie()

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        return self._blocks()[0].attn.n_kv_heads

    def adapter_parts(self) -> Mapping[tuple[int, str], Part]:
        """By layer and place, what this rank has of matrices that it shares with others."""
        return {
            (layer, place): matrix.parts["weight"]
            for layer, block in enumerate(self._blocks())
            for place, matrix in _matrices(block).items()
            if "weight" in matrix.parts
        }

    def fuse(self, ops: Ops) -> None:
        """From now on run in few, wide operations of this bundle, on matrices that are joined where that helps. A model
        is fused once."""
        if self.is_fused:
            return
        use_ops(self, ops)
        for block in self._blocks():
            block.join()
            use_ops(block, ops)
        self.is_fused = True

    def to_fp8(self, *, experts_only: bool = False) -> None:
        """From now on run on float8 matrices, which take the place of the blocks' own."""
        for block in self._blocks():
            if block.has_experts or not experts_only:
                block.to_fp8(experts_only=experts_only)
        self.quantization = "fp8-experts" if experts_only else "fp8"

    @property
    def has_experts(self) -> bool:
        return any(block.has_experts for block in self._blocks())

    def filled_up(self, num_rows: int) -> int:
        """To how many rows a step of so many is best filled up."""
        is_filled = self.quantization == "fp8" and not self.has_experts
        return max(num_rows, FEWEST_ROWS) if is_filled and num_rows > max(1, self.ops.max_small_fp8_rows) else num_rows

    def matrix_sides(self) -> set[int]:
        """Of the blocks' matrices that may become float8, experts apart."""
        layers = list(self.blocks.modules())
        routers = {layer.router for layer in layers if isinstance(layer, Moe)}
        return {s for layer in layers if isinstance(layer, Linear) and layer not in routers for s in layer.weight.shape}

    def embed(self, ids_T: Tensor) -> Tensor:
        return functional.embedding(ids_T, self.wte)

    def forward(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        adapt: Adapt | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last block, not normalised: of the wanted positions, which is what the last
        block computes once all keys and values are stored, or of all."""
        assert x_TD.ndim == 2
        assert positions_T.shape == x_TD.shape[:1]
        step, pending = Step(positions_T, attend, self.rope, adapt), cast(Pending, ())
        *blocks, last = self.blocks
        for block in blocks:
            x_TD, pending = block(x_TD, pending, step)
        x_TD, pending = last(x_TD, pending, step, wanted_N)
        return self.post_ln.of_sum(x_TD, pending)[0] if pending else x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        norm, head = self.post_ln, self.lm_head
        if isinstance(norm, RmsNorm) and hidden_TD.shape[0] <= head.ops.max_small_rows:
            logits_TV = head.ops.small_linear(hidden_TD, head.weight, head.bias, norm=(norm.weight, norm.eps))
        else:
            logits_TV = head(norm(hidden_TD))
        return self._head_ranks.gather(logits_TV)

    def _blocks(self) -> list[ParallelBlock | SequentialBlock]:
        return cast("list[ParallelBlock | SequentialBlock]", list(self.blocks))
