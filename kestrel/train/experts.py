"""Experts in training: all of them on every token, the unchosen ones with weight zero.

The engine sorts tokens by expert and reads counts on the host; in training that would stop the device in every layer.
Here two large matrix products do the same sum, at the price of arithmetic that a small model can afford. It also keeps
what evens out the routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.layers.mlp import Moe
from kestrel.moondream.model import MoondreamModel


class AllExpertsMlp(Moe):
    """A `Moe` on the same parameters under the same names. `balance` is 1 when experts are used evenly."""

    def __init__(self, routed: Moe) -> None:
        torch.nn.Module.__init__(self)
        self.experts_per_token = routed.experts_per_token
        self.router, self.fc1, self.fc2 = routed.router, routed.fc1, routed.fc2
        self.balance: Tensor | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        num_experts, inner = self.fc1.weight.shape[0], self.fc2.weight.shape[2]
        logits_TE = self.router(x_TD).float()
        is_chosen_TE = among_top(logits_TE, self.experts_per_token)
        share_E = is_chosen_TE.float().mean(0) / self.experts_per_token
        self.balance = num_experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()
        weights_TE = logits_TE.masked_fill(~is_chosen_TE, -torch.inf).softmax(-1)
        both = functional.linear(x_TD, self.fc1.weight.flatten(0, 1)).view(-1, num_experts, 2, inner)
        hidden, gate = both.unbind(2)
        active = functional.gelu(hidden) * (gate + 1.0) * weights_TE[:, :, None]
        fc2_DN = self.fc2.weight.permute(1, 0, 2).flatten(1)
        return functional.linear(active.flatten(1).to(x_TD.dtype), fc2_DN)


def among_top(logits_TE: Tensor, k: int) -> Tensor:
    """Whether each is one of the k largest of its row; of equals the first wins."""
    other, own = logits_TE[:, None, :], logits_TE[:, :, None]
    index = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    beats = (other > own) | ((other == own) & (index[None, :] < index[:, None]))
    return beats.sum(-1) < k


@contextmanager
def all_experts(model: MoondreamModel) -> Iterator[list[AllExpertsMlp]]:
    """Inside, every mixture of the model computes all its experts; after it they are the engine's again."""
    routed = {block: block.mlp for block in model.text.blocks if isinstance(block.mlp, Moe)}
    swapped = {block: AllExpertsMlp(mlp) for block, mlp in routed.items()}
    for block, mlp in swapped.items():
        block.mlp = mlp
    try:
        yield list(swapped.values())
    finally:
        for block, mlp in routed.items():
            block.mlp = mlp
