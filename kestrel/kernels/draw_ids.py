"""An id for each row that draws, and the most likely one for the others.

An entry b of B belongs to row rows_B[b], whose numbers say how it chooses: with temperature 0 as `best_ids` does,
otherwise by truncation and race (`kestrel.kernels.sampling`) from the row's seed and its count of generated tokens.
A row whose best score is not finite has nothing to draw from: its id is one of the vocabulary, and any will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.kernels.best_ids import rank
from kestrel.kernels.row_tables import DrawingRows
from kestrel.kernels.sampling import Truncation, draw, truncate


def draw_ids(scores_BV: Tensor, rows_B: Tensor, rows: DrawingRows) -> Tensor:
    """Ranks [1, B, 1], for `commit_ids`: the row's best score with the chosen id.

    Scores are fp32, what a row must not sample at −inf, as of `allowed_scores`.
    """
    best_B, likeliest_B = scores_BV.max(-1)
    how = Truncation(rows.temperature[rows_B], rows.top_k[rows_B], rows.top_p[rows_B], rows.min_p[rows_B])
    drawn_B = draw(*truncate(scores_BV, how), rows.seed[rows_B], rows.generated[rows_B])
    return rank(best_B, torch.where(how.temperature_B > 0, drawn_B, likeliest_B))[None, :, None]
