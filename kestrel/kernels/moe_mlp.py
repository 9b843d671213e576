"""Mixture-of-experts MLP: each token goes through its own few experts.

    ids      = top-k of the router logits
    w        = their softmax, over the chosen experts or over all, in fp32
    z        = fc1_e · x        = [h | g]
    out_e    = fc2_e · gate(h, g)
    y        = Σ_k w_k · out_{ids_k}

The gate is GELU_erf(h) · (g + 1) (Moondream) or SiLU(h) · g (the usual one).

Matrix products run in the dtype of x; the weighted sum runs in fp32 over a token's experts in routing order, so the
result of a token does not depend on where it stands in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.fp8 import rows_to_fp8
from kestrel.kernels.linear import silu_gate
from kestrel.kernels.low_rank import low_rank

Gate: TypeAlias = Literal["gelu", "silu"]
Work: TypeAlias = Callable[[], Tensor]


def side_by_side(first: Work, second: Work) -> tuple[Tensor, Tensor]:
    """What two parts of a step give, such as attention and experts, neither of which needs the other. A bundle may run
    them at the same time."""
    return first(), second()


def route_top_k(router_logits_TE: Tensor, k: int, *, over_all: bool = False) -> tuple[Tensor, Tensor]:
    """(weights [T, k] fp32, expert ids [T, k]), most likely expert first.

    Weights sum to one; `over_all`: with those of the experts that were not chosen.
    """
    logits_TE = router_logits_TE.float()
    top_TK, ids_TK = logits_TE.topk(k, dim=1)
    weights_TK = logits_TE.softmax(dim=1).gather(1, ids_TK) if over_all else top_TK.softmax(dim=1)
    return weights_TK, ids_TK


def moe_mlp(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None = None,
    fc2_scale_ED: Tensor | None = None,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """y [T, D] for routed tokens; F = 2·I. Reads the number of tokens per expert on the host.

    Scales are those of matrices kept in float8, one per output.
    """
    assert fc1_EFD.shape[1] == 2 * fc2_EDI.shape[2]

    def run_expert(expert: int, _: Tensor, x_ND: Tensor) -> Tensor:
        fc1_FD = _widened(fc1_EFD[expert], fc1_scale_EF, expert, x_ND.dtype)
        return expert_mlp(x_ND, fc1_FD, _widened(fc2_EDI[expert], fc2_scale_ED, expert, x_ND.dtype), gate)

    return mix_experts(x_TD, weights_TK, ids_TK, fc1_EFD.shape[0], run_expert)


def moe_mlp_fp8(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor,
    fc2_scale_ED: Tensor,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """`moe_mlp` over matrices in float8 with rows of x, and of what is between the matrices, rounded to float8 too."""

    def run_expert(expert: int, _: Tensor, x_ND: Tensor) -> Tensor:
        fc1_FD = _widened(fc1_EFD[expert], fc1_scale_EF, expert, x_ND.dtype)
        hidden_NI = gate_hidden(functional.linear(_rounded(x_ND), fc1_FD), gate)
        return functional.linear(_rounded(hidden_NI), _widened(fc2_EDI[expert], fc2_scale_ED, expert, x_ND.dtype))

    return mix_experts(x_TD, weights_TK, ids_TK, fc1_EFD.shape[0], run_expert)


class ExpertFactors(NamedTuple):
    """Low-rank factors of all experts' matrices for all slots. Each slot has a rank of its own."""

    a_SERD: Tensor
    b_SEFR: Tensor
    rank_S: Tensor
    """int32, one longer than the others: the base model counts as the last slot, of rank 0."""


class ExpertDeltas(NamedTuple):
    """What adapters add to the experts of one layer."""

    slot_T: Tensor
    """Slot of each token, -1 for the base model."""
    fc1: ExpertFactors
    fc2: ExpertFactors


def moe_mlp_adapted(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None,
    fc2_scale_ED: Tensor | None,
    deltas: ExpertDeltas,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """`moe_mlp` with the low-rank deltas of each token's adapter added to both matrices of each of its experts."""

    def run_expert(expert: int, positions_N: Tensor, x_ND: Tensor) -> Tensor:
        slot_N = deltas.slot_T[positions_N]
        z_NF = functional.linear(x_ND, _widened(fc1_EFD[expert], fc1_scale_EF, expert, x_ND.dtype))
        hidden_NI = gate_hidden(_with_deltas(z_NF, x_ND, slot_N, deltas.fc1, expert), gate)
        y_ND = functional.linear(hidden_NI, _widened(fc2_EDI[expert], fc2_scale_ED, expert, x_ND.dtype))
        return _with_deltas(y_ND, hidden_NI, slot_N, deltas.fc2, expert)

    return mix_experts(x_TD, weights_TK, ids_TK, fc1_EFD.shape[0], run_expert)


def _with_deltas(y_NF: Tensor, x_ND: Tensor, slot_N: Tensor, factors: ExpertFactors, expert: int) -> Tensor:
    for slot in sorted({slot for slot in slot_N.tolist() if slot >= 0}):
        rank, rows_N = int(factors.rank_S[slot]), (slot_N == slot).nonzero()[:, 0]
        a_RD, b_FR = factors.a_SERD[slot, expert, :rank], factors.b_SEFR[slot, expert, :, :rank]
        y_NF.index_add_(0, rows_N, low_rank(x_ND[rows_N], a_RD, b_FR))
    return y_NF


def _rounded(x_ND: Tensor) -> Tensor:
    numbers_ND, scale_N1 = rows_to_fp8(x_ND)
    return (numbers_ND.float() * scale_N1).to(x_ND.dtype)


def _widened(matrix_FD: Tensor, scale_EF: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    return matrix_FD if scale_EF is None else (matrix_FD.float() * scale_EF[expert][:, None]).to(dtype)


def mix_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    num_experts: int,
    run_expert: Callable[[int, Tensor, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of what `run_expert(expert, positions_N, x_ND)` makes of the tokens routed to each expert."""
    assert x_TD.ndim == 2
    assert weights_TK.shape == ids_TK.shape == (x_TD.shape[0], ids_TK.shape[1])
    num_tokens, k = ids_TK.shape
    if num_tokens == 0:
        return x_TD
    if num_tokens == 1:  # nothing to sort: a fifth of the time of a small model's layer on a CPU
        at_1 = torch.zeros(1, dtype=torch.long, device=x_TD.device)
        out_KD = torch.cat([run_expert(expert, at_1, x_TD) for expert in ids_TK[0].tolist()])
        return (out_KD * weights_TK.T).sum(dim=0, keepdim=True).to(x_TD.dtype)
    flat_ids = ids_TK.reshape(-1)
    counts: list[int] = torch.bincount(flat_ids, minlength=num_experts).tolist()
    order = flat_ids.argsort(stable=True)
    positions = order // k
    # Cut in one go: in training, the gradient of a slice is as large as the whole.
    shares = zip(positions.split_with_sizes(counts), x_TD[positions].split_with_sizes(counts), strict=True)
    outputs = [run_expert(expert, *share) for expert, share in enumerate(shares) if counts[expert]]
    out_TKD = torch.cat(outputs)[order.argsort()].view(num_tokens, k, -1)
    return (out_TKD * weights_TK[:, :, None]).sum(dim=1).to(x_TD.dtype)


def expert_mlp(x_ND: Tensor, fc1_FD: Tensor, fc2_DI: Tensor, gate: Gate = "gelu") -> Tensor:
    """One expert on the tokens routed to it."""
    return functional.linear(gate_hidden(functional.linear(x_ND, fc1_FD), gate), fc2_DI)


def gate_hidden(z_NF: Tensor, gate: Gate = "gelu") -> Tensor:
    """What goes into fc2, of z = [h | g]."""
    if gate == "silu":
        return silu_gate(z_NF)
    h_NI, g_NI = z_NF.chunk(2, dim=1)
    return functional.gelu(h_NI) * (g_NI + 1.0)
