"""A text decoder: embedding, blocks, last norm and output head.

There is no batch dimension: T counts positions of any number of sequences. Who attends to whom is the business of the
`Attend` that a step brings, which also owns the stored keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.ops import Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend, Rope, Step
from kestrel.layers.blocks import ParallelBlock, SequentialBlock
from kestrel.layers.linear import Linear, normal_parameter, use_ops
from kestrel.layers.norm import Norm, Pending


class TextDecoder(nn.Module):
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
        """Computes what no checkpoint holds; needed after `load_state_dict(assign=True)` on a meta model."""
        if self.rope is not None:
            self.rope.reset_buffers(device)
        if self._is_tied:
            self.lm_head.weight = self.wte

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
            if not experts_only or (isinstance(block, ParallelBlock) and block.has_experts):
                block.to_fp8()
        self.quantization = "fp8-experts" if experts_only else "fp8"

    def matrix_sides(self) -> set[int]:
        """Of the blocks' matrices."""
        return {side for layer in self.blocks.modules() if isinstance(layer, Linear) for side in layer.weight.shape}

    def embed(self, ids_T: Tensor) -> Tensor:
        return functional.embedding(ids_T, self.wte)

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        """The residual stream after the last block, not normalised."""
        assert x_TD.ndim == 2
        assert positions_T.shape == x_TD.shape[:1]
        step, pending = Step(positions_T, attend, self.rope, adapt), cast(Pending, ())
        for block in self.blocks:
            x_TD, pending = block(x_TD, pending, step)
        return self.post_ln.of_sum(x_TD, pending)[0] if pending else x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.lm_head(self.post_ln(hidden_TD))

    def _blocks(self) -> list[ParallelBlock | SequentialBlock]:
        return cast("list[ParallelBlock | SequentialBlock]", list(self.blocks))
