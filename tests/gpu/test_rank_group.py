"""Ranks on a GPU: what NCCL offers, with a group of one, and the kernels on parts of a model, in two threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN
from kestrel.layers.attention import Attention
from kestrel.parallel.group import RankGroup
from kestrel.parallel.ranks import Ranks
from tests.llama.tiny_folders import write_folder
from tests.moondream.coarse import coarse_folder
from tests.parallel.rank_threads import in_ranks
from tests.parallel.test_split_layers import FEW, MANY, decoder, logits, text_of

pytestmark = pytest.mark.gpu


def test_sums_are_captured_with_the_work_around_them(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    group = RankGroup(0, 1)
    group.meet(tmp_path / "meeting")
    group.connect(device)
    try:
        assert group.least(7) == 7

        def work(x_TD: Tensor) -> Tensor:
            return group.gather(group.sum(x_TD * 2)) + 1

        x_TD = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
        assert torch.equal(work(x_TD), torch.full_like(x_TD, 3))
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y_TD = work(x_TD)
        x_TD.fill_(5)
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(y_TD, torch.full_like(x_TD, 11))
    finally:
        group.end()


@pytest.mark.parametrize("kind", ["md2", "md3", "llama", "qwen3_moe"])
def test_kernels_on_parts_give_the_logits_of_the_whole(kind: str, tmp_path: Path) -> None:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - needs a GPU

    folders = {kind: coarse_folder(kind) if kind.startswith("md") else write_folder(tmp_path / kind, kind)}

    def run(ranks: Ranks) -> list[Tensor]:
        model = decoder(kind, folders, ranks, "cuda")
        model.fuse(TRITON)
        for heads in (part for part in text_of(model).modules() if isinstance(part, Attention)):
            for norm in filter(None, (heads.q_norm, heads.k_norm)):
                norm.ops = PLAIN  # in an engine the kernel that stores keys does this: see `causal`
        return [logits(model, FEW), logits(model, MANY)]

    expected = in_ranks(1, run)[0]
    for found in in_ranks(2, run):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 1e-3 * other.norm()
