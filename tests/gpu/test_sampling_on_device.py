"""The sampling tables on a GPU give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from kestrel.grammar import free_text
from kestrel.kernels.commit_ids import advance, stop
from kestrel.kernels.sampling import weigh_ids
from kestrel.runtime.contract import RowStart
from kestrel.runtime.device import upload
from kestrel.runtime.rows import GrammarTables, RowTable
from kestrel.settings import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB = 512
ROWS = [3, 0, 2, 1]
OPTIONS = [
    SamplingParams(),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.5),
    SamplingParams(logit_bias=((5, 7.5), (9, -100.0)), repetition_penalty=0.5),
    SamplingParams(min_tokens=4, stop_token_ids=(7, 8)),
]


def scores_and_ends(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        table = RowTable(4, 1, 0, VOCAB, GrammarTables(VOCAB, device), device)
        for row, sampling in enumerate(OPTIONS):
            penalised = sampling.has_penalties and row == 1
            said = (11, 12, 11) if penalised else ()
            table.apply_starts([RowStart(row, free_text(0), sampling, 9, prompt_ids=said[:1], generated_ids=said)])
        rows_B = upload(ROWS, device)
        state_B, spent_B = table.tensors.state[rows_B], torch.zeros(4, dtype=torch.int64, device=device)
        sampled_B = upload([7, 12, 5, 11], device)
        kinds = table.wishes.among(ROWS)
        table.wishes.count(kinds, rows_B, sampled_B, sampled_B > 0)
        raw_BV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
        scores_BV = weigh_ids(raw_BV, rows_B, table.wishes.tensors(kinds))
        assert not torch.equal(scores_BV, raw_BV)
        scores_BV = table.endings.forbid(scores_BV, ROWS, state_B, spent_B)
        step = advance(state_B, sampled_B, spent_B > 0, table.grammars.tensors)
        step = stop(step, rows_B, state_B, table.grammars.tensors, table.endings.tensors)
        return scores_BV.cpu(), step.ended_B.cpu()


def test_scores_and_endings_equal_those_of_the_cpu() -> None:
    on_gpu, ended = scores_and_ends(torch.device("cuda"))
    on_cpu, expected = scores_and_ends(torch.device("cpu"))
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-6, rtol=1e-6)
    assert ended.tolist() == expected.tolist() == [True, False, False, False]
