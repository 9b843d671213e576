"""Token choice: truncation as the reference does it, draws that depend on seed and count alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kestrel.kernels.sampling import Truncation, draw, exponentials, truncate

GOLDENS = Path(__file__).parents[1] / "goldens"


def truncation(rows: int = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    return Truncation(full(temperature), full(top_k, torch.int64), full(top_p), full(min_p))


def probabilities(logits: torch.Tensor, **how: float) -> torch.Tensor:
    """Back in vocabulary order."""
    sorted_probs, order = truncate(logits, truncation(len(logits), **how))
    return torch.zeros_like(sorted_probs).scatter_(1, order, sorted_probs)


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_top_p_equals_the_reference(family: str) -> None:
    units = load_file(GOLDENS / family / "units.safetensors")
    cases = [name for name in units if name.startswith("topp_T")]
    if not cases:
        pytest.skip("this family's goldens hold no top-p cases")
    for name in cases:
        temperature, top_p = name.removeprefix("topp_T").split("_p")
        logits = units["topp_logits"].reshape(-1, units["topp_logits"].shape[-1])
        ours = probabilities(logits, temperature=float(temperature), top_p=float(top_p))
        torch.testing.assert_close(ours, units[name].reshape(ours.shape), atol=1e-6, rtol=1e-5)


def test_the_token_that_crosses_top_p_stays() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert (probabilities(logits, top_p=0.6) > 0).tolist() == [[True, True, False, False]]
    assert (probabilities(logits, top_p=0.5001) > 0).sum() == 2
    assert (probabilities(logits, top_p=0.01) > 0).sum() == 1
    assert (probabilities(logits, top_p=0.0) > 0).sum() == 1


def test_top_k_and_min_p_cut_where_they_say() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert (probabilities(logits, top_k=2) > 0).tolist() == [[False, True, False, True]]
    assert (probabilities(logits, min_p=0.6) > 0).tolist() == [[False, True, False, True]]
    torch.testing.assert_close(probabilities(logits, top_k=2)[0, 1], torch.tensor(0.4 / 0.7))


def test_draws_follow_the_distribution_and_never_leave_it() -> None:
    n = 20_000
    logits = torch.log(torch.tensor([0.6, 0.3, 0.1])).repeat(n, 1)
    sorted_probs, order = truncate(logits, truncation(n, top_k=2))
    drawn = draw(sorted_probs, order, torch.full((n,), 7), torch.arange(n))
    share = torch.bincount(drawn, minlength=3).float() / n
    assert share[2] == 0
    assert abs(share[0] - 2 / 3) < 0.015


def test_noise_depends_on_seed_count_and_id_and_nothing_else() -> None:
    seeds, counts = torch.tensor([0, 1, 2**63 - 1, 12345]), torch.tensor([0, 5, 9, 9])
    together = exponentials(seeds, counts, 50)
    alone = torch.cat([exponentials(seeds[i : i + 1], counts[i : i + 1], 70)[:, :50] for i in range(4)])
    assert torch.equal(together, alone)
    assert len(together.unique()) == together.numel()


def test_noise_is_exponential_and_independent_of_its_neighbours() -> None:
    noise = exponentials(torch.full((1000,), 3), torch.arange(1000), 200)
    assert noise.min() > 0.0
    assert noise.isfinite().all()
    assert abs(noise.mean() - 1.0) < 0.01
    assert abs(noise.var() - 1.0) < 0.03
    assert abs((noise < 0.01).float().mean() - 0.00995) < 0.001
    for a, b in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.01


@pytest.mark.parametrize("kept", [0, 2, 4])
def test_only_a_kept_token_is_drawn_whatever_the_noise(kept: int) -> None:
    logits = torch.full((5000, 5), -1e4)
    logits[:, kept] = 0.0
    probs, order = truncate(logits, truncation(5000))
    assert (draw(probs, order, torch.arange(5000), torch.zeros(5000, dtype=torch.int64)) == kept).all()


def test_a_draw_hardly_ever_changes_with_the_last_bits_of_logits() -> None:
    """Shares of [0, 1) in the order of likelihood give another id in 4 of these 2000 draws."""
    n, generator = 2000, torch.Generator().manual_seed(5)
    logits = torch.randn((n, 1000), generator=generator)
    noisy = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    seeds, counts = torch.full((n,), 7), torch.arange(n)
    before, after = (draw(*truncate(x, truncation(n)), seeds, counts) for x in (logits, noisy))
    assert (before != after).sum() <= 1
