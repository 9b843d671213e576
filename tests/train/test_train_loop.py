"""The loop learns, every parameter takes part, and what it leaves behind is the average."""

from __future__ import annotations

import csv
import math
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel.layers.mlp import Moe
from kestrel.train.curves import GAP, MARGIN, PANEL, WIDTH, CurveWriter, draw_curves, tick_values
from kestrel.train.loop import AveragedWeights, StepReport, TrainingPlan, block_matrices, train
from kestrel.train.objective import AllExpertsMlp, all_experts, losses
from tests.train.small_model import small_batch, small_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("orthogonal", [True, False])
def test_losses_fall_on_one_batch(tmp_path: Path, orthogonal: bool) -> None:
    plan = TrainingPlan(
        steps=30,
        lr=4e-3,
        final_lr=4e-3,
        warmup_steps=3,
        log_every=5,
        orthogonal=orthogonal,
        mixed_precision=False,
    )
    lines: list[StepReport] = []
    seen = train(small_model(), repeat(small_batch()), plan, CurveWriter(tmp_path / "c.csv"), lines.append, 100)
    assert seen == 100 + 30 * 2
    first, last = lines[0], lines[-1]
    assert last.text < 0.3 * first.text
    assert last.coord < first.coord - 1.0
    assert last.size < first.size - 1.0
    assert last.token_accuracy == 1.0
    with (tmp_path / "c.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20, 25, 30]
    draw_curves(tmp_path / "c.csv", tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_curves_have_losses_above_on_a_log_scale_and_shares_below_from_0_to_1(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("pictures,loss,val_f1\n10,0.1,0.25\n20,0.1,0.25\n")
    colours = {"loss": "#0000ff", "val_f1": "#ff0000"}
    draw_curves(tmp_path / "c.csv", tmp_path / "c.png", "pictures", colours)
    with Image.open(tmp_path / "c.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    inside = pixels[:, WIDTH - 2 * MARGIN]  # right of what is written above the panels
    blue, red = (np.flatnonzero(abs(inside - colour).sum(1) == 0).mean() for colour in ((0, 0, 255), (255, 0, 0)))
    assert blue == pytest.approx(GAP + PANEL * 2 / 3, abs=2)
    assert red == pytest.approx(2 * GAP + PANEL + PANEL * 3 / 4, abs=2)


@pytest.mark.parametrize(
    ("last", "ticks"),
    [(1, [0, 1]), (7.5, list(range(8))), (20, [0, 5, 10, 15, 20]), (1_590_000, [*range(0, 1_400_001, 200_000)])],
)
def test_ticks_are_round_numbers_up_to_the_end(last: float, ticks: list[int]) -> None:
    assert tick_values(last) == ticks


def test_gradients_reach_every_parameter() -> None:
    model = small_model()
    # Output projections start at zero and hold back what is before them; any other value lets it through.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    with all_experts(model) as experts:
        losses(model, experts, *small_batch(), torch.float32).total.backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert untouched == []


def test_the_engines_experts_are_back_after_training(tmp_path: Path) -> None:
    model = small_model()
    names = [name for name, _ in model.named_parameters()]
    train(
        model,
        repeat(small_batch()),
        TrainingPlan(steps=1, mixed_precision=False),
        CurveWriter(tmp_path / "c.csv"),
        lambda _: None,
    )
    mixtures = [module for module in model.modules() if isinstance(module, Moe)]
    assert mixtures
    assert not any(isinstance(module, AllExpertsMlp) for module in mixtures)
    assert [name for name, _ in model.named_parameters()] == names


def test_orthogonal_steps_take_the_matrices_of_blocks_only() -> None:
    model = small_model()
    names = {name for name, p in model.named_parameters() if p in block_matrices(model)}
    assert "text.blocks.0.attn.qkv.weight" in names
    assert "text.blocks.1.mlp.fc1.weight" in names
    assert "vision.proj_mlp.fc1.weight" in names
    assert not any("router" in name or "tau" in name or "bias" in name or ".ln" in name for name in names)
    assert not any(name.startswith("region") or name in ("text.wte", "text.lm_head.weight") for name in names)


def test_the_average_of_constant_weights_is_those_weights_and_swapping_twice_changes_nothing() -> None:
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    average = AveragedWeights(model, 0.99)
    average.update()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    average.swap()
    for now, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then)
    average.swap()
    torch.testing.assert_close(next(model.parameters()).detach(), before[0] + 1.0)


def test_the_learning_rate_warms_up_and_falls_with_steps_or_time_whichever_is_further() -> None:
    plan = TrainingPlan(steps=100, lr=1.0, final_lr=0.1, warmup_steps=10, max_seconds=50.0)
    assert plan.lr_at(0) == pytest.approx(0.1, rel=0.01)
    assert plan.lr_at(50) == pytest.approx(0.55)
    assert plan.lr_at(100) == pytest.approx(0.1)
    assert plan.lr_at(20, seconds=25.0) == pytest.approx(0.55)
    assert TrainingPlan(steps=100, lr=1.0, final_lr=1.0).max_seconds == math.inf
