"""Training: losses fall, only factors change, runs repeat and resume bit by bit, and the file is what was judged."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from kestrel.adapters import Adapter
from kestrel.errors import ConfigError, NumericalError
from kestrel.models.adapting import SingleAdapter
from kestrel.moondream.decoder import adapter_shape
from kestrel.train.adapter.encoding import RowOrder
from kestrel.train.adapter.loop import Factors, HeldOut, LoopPlan
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.run import Trained, run_adapter
from kestrel.train.model import merge_adapter
from kestrel.train.objective import TaskTensors, hidden_states
from kestrel.train.packing import pack
from tests.exhaustive import sweep
from tests.moondream.coarse import POSITIONS, coarse_folder

from .data_folder import small_folder
from .runs import QuietReport, loaded_adapter, options, run, task_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("data"))


@sweep("family", ["md2", "md3"], always=["md2"])
def test_the_loss_falls_and_the_file_has_the_loss_that_was_told(family: str, data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", family, steps=16, val_every=8)
    done, report = run(chosen)
    assert report.lines[-1].loss < 0.6 * report.lines[0].loss
    assert done.ending == "all steps are done"
    assert done.val_loss == min(line.val_loss for line in report.lines if line.val_loss is not None)
    task, _, val, loaded = task_of(chosen)
    adapter = loaded_adapter(chosen.output, loaded)
    assert task.judge(val, adapter, chosen.batch_size) == pytest.approx(done.val_loss, abs=1e-6)
    assert (adapter.base_model, adapter.rank, adapter.alpha) == (family, chosen.rank, float(chosen.rank))
    assert adapter.metadata["skills"] == "caption detect point query"
    assert adapter.metadata["steps"] == str(done.step)
    assert float(adapter.metadata["val_loss"]) == pytest.approx(done.val_loss, rel=1e-5)
    assert len(adapter.metadata["data_digest"]) == 64


@pytest.mark.exhaustive
def test_a_few_steps_teach_the_embedded_model(data: Path, tmp_path: Path) -> None:
    brief = {"batch_size": 1, "steps": 3, "val_every": 3}
    chosen = options(data, tmp_path / "a.safetensors", rank=8, model_path=None, lr=2e-3, **brief)
    done, report = run(chosen)
    task, _, val, loaded = task_of(chosen)
    untrained = Factors(adapter_shape(loaded.config.text), chosen.matrices, 8, 8.0).adapter()
    assert done.val_loss is not None
    assert done.val_loss < 0.9 * task.judge(val, untrained, 2)
    assert report.begun[0].base_model == "kestrel-tiny"


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_gradients_reach_every_factor_and_nothing_of_the_base(family: str, data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", family, steps=1)
    task, train, _, loaded = task_of(chosen)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    factors = Factors(adapter_shape(loaded.config.text), chosen.matrices, chosen.rank, 8.0, seed=3)
    with torch.no_grad():
        for factor in factors.parameters():
            factor.add_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    found, _ = task.losses(train[:3], task.adapt(factors.adapter()))
    found.total.backward()
    assert all(factor.grad is not None and factor.grad.abs().sum() > 0 for factor in factors.parameters())
    assert all(p.grad is None and not p.requires_grad for p in loaded.model.parameters())
    run(chosen)
    on_disk = load_file(coarse_folder(family) / "model.safetensors")
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert torch.equal(value, on_disk[f"model.{name}"].float()), name


@sweep("family", ["md2", "md3"], always=["md3"])
def test_gradients_are_those_of_the_loss(family: str, data: Path, tmp_path: Path) -> None:
    """By finite differences in double precision, so small that no token changes its experts."""
    chosen = options(data, tmp_path / "a.safetensors", family, targets="qkv,fc2")
    task, train, _, loaded = task_of(chosen)
    loaded.model.double()
    task.dtype = torch.float64
    task._pictures._kept = {i: task._pictures._one(i).double() for i in range(4)}
    factors = Factors(adapter_shape(loaded.config.text), ("qkv", "fc2"), chosen.rank, 6.0, seed=2)
    chance = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for factor in factors.parameters():
            factor.add_(torch.randn(factor.shape, generator=chance), alpha=0.05)

    def loss() -> torch.Tensor:
        return task.losses(train[:1], task.adapt(factors.adapter()))[0].total

    loss().backward()
    direction = [torch.randn(factor.shape, generator=chance) for factor in factors.parameters()]
    slope = sum(
        (f.grad * d).sum().item() for f, d in zip(factors.parameters(), direction, strict=True) if f.grad is not None
    )
    values, step = factors.values(), 2.0**-13
    ends = []
    for sign in (1.0, -1.0):
        factors.assign([value + sign * step * d for value, d in zip(values, direction, strict=True)])
        with torch.no_grad():
            ends.append(loss().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-2)


@sweep("family", ["md2", "md3"], always=["md3"])
def test_an_adapter_that_was_merged_gives_the_same_stream(family: str, data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", family, steps=2)
    run(chosen)
    task, train, _, loaded = task_of(chosen)
    adapter = loaded_adapter(chosen.output, loaded)
    packed = TaskTensors.upload(pack([train[0].tasks], 64, task._ids, POSITIONS), torch.device("cpu"))
    pictures = task._pictures.batch([train[0].picture]).double()
    loaded.model.double()
    with torch.no_grad():
        plain = hidden_states(loaded.model, pictures, packed)
        single = SingleAdapter(adapter, adapter_shape(loaded.config.text), dtype=torch.float64)
        applied = hidden_states(loaded.model, pictures, packed, single)
        merge_adapter(loaded.model, adapter)
        merged = hidden_states(loaded.model, pictures, packed)
    at = packed.task[0] >= 0
    torch.testing.assert_close(merged[0, at], applied[0, at], atol=1e-5, rtol=0)
    assert (plain - merged).abs().max() > 1e-2


def bits(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def assert_same_file(a: Path, b: Path) -> None:
    first, second = bits(a), bits(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.exhaustive
def test_the_same_run_gives_the_same_bits_and_another_seed_others(data: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for output, seed in zip(outputs, (0, 0, 1), strict=True):
        run(options(data, output, seed=seed, steps=2))
    assert_same_file(outputs[0], outputs[1])
    assert any(not torch.equal(bits(outputs[0])[name], value) for name, value in bits(outputs[2]).items())


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterRun, Trained, QuietReport]:
    chosen = options(data, tmp_path_factory.mktemp("whole") / "whole.safetensors", steps=5, val_every=2, log_every=1)
    return chosen, *run(chosen)


@sweep("stop_after", [1, 3], always=[3])
def test_a_run_that_was_stopped_and_resumed_is_an_uninterrupted_one_bit_by_bit(
    stop_after: int, uninterrupted: tuple[AdapterRun, Trained, QuietReport], tmp_path: Path
) -> None:
    whole, done, report = uninterrupted
    parts = replace(whole, output=tmp_path / "parts.safetensors")
    first = QuietReport()
    stopped = run_adapter(parts, first, lambda: len(first.lines) >= stop_after)
    assert stopped.ending == "interrupted"
    assert stopped.steps_done == stop_after
    assert parts.output.exists()
    second = QuietReport()
    resumed = run_adapter(replace(parts, resume=True), second)
    assert second.begun[0].first_step == stop_after
    assert (resumed.step, resumed.val_loss, resumed.ending) == (done.step, done.val_loss, done.ending)
    assert_same_file(whole.output, parts.output)
    told = [(line.step, line.loss, line.val_loss) for line in (*first.lines, *second.lines)]
    assert told == [(line.step, line.loss, line.val_loss) for line in report.lines]
    rows = [list(csv.DictReader((each.folder / "curves.csv").read_text().splitlines())) for each in (whole, parts)]
    assert [(row["step"], row["loss"]) for row in rows[0]] == [(row["step"], row["loss"]) for row in rows[1]]
    with Image.open(parts.folder / "curves.png") as picture:
        assert picture.width > 100


@pytest.mark.exhaustive
def test_figures_of_held_out_pictures_go_to_lines_curves_and_the_file_and_change_no_bit(
    uninterrupted: tuple[AdapterRun, Trained, QuietReport], tmp_path: Path
) -> None:
    whole, done, _ = uninterrupted
    chosen, report = replace(whole, output=tmp_path / "a.safetensors"), QuietReport()
    seen: list[float] = []

    def examine(adapter: Adapter) -> HeldOut:
        seen.append(sum(pair.b.abs().sum().item() for pair in adapter.targets.values()))
        return HeldOut(0.25 * len(seen), None if len(seen) == 1 else 0.5)

    found = run_adapter(chosen, report, make_examiner=lambda *_: examine)
    assert len(set(seen)) == 3  # the factors of each look
    looks = [(line.val_f1, line.val_ap50) for line in report.lines if line.val_loss is not None]
    assert looks == [(0.25, None), (0.5, 0.5), (0.75, 0.5)]
    assert_same_file(whole.output, chosen.output)
    best = looks[[line.step for line in report.lines if line.val_loss is not None].index(done.step)]
    assert (found.val_f1, found.val_ap50) == best
    metadata = loaded_adapter(chosen.output, task_of(chosen)[3]).metadata
    assert float(metadata["val_f1"]) == best[0]
    rows = list(csv.DictReader((chosen.folder / "curves.csv").read_text().splitlines()))
    assert [row["val_f1"] for row in rows if row["val_f1"]] == ["0.25", "0.5", "0.75"]
    again = run_adapter(replace(chosen, resume=True), QuietReport(), make_examiner=lambda *_: examine)
    assert (again.val_f1, len(seen)) == (best[0], 3)
    held_out = (chosen.folder / "held_out.txt").read_text().splitlines()
    assert len(held_out) == 1
    assert (chosen.data / held_out[0]).is_file()


def test_resuming_with_other_options_data_or_nothing_is_refused(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", steps=2)
    with pytest.raises(ConfigError, match="resume: there is nothing to continue from"):
        run(replace(chosen, resume=True))
    run(chosen)
    with pytest.raises(ConfigError, match=r"lr: is 0.02, the run to resume has 0.01"):
        run(replace(chosen, resume=True, lr=0.02))
    other = small_folder(tmp_path / "other", 3)
    with pytest.raises(ConfigError, match="data: is"):
        run(replace(chosen, resume=True, data=other))
    (chosen.folder / "state.pt").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"state.pt is damaged .* --overwrite"):
        run(replace(chosen, resume=True))
    with pytest.raises(ConfigError, match=r"a.safetensors exists; give --resume to continue, --overwrite"):
        run(chosen)
    assert run(replace(chosen, overwrite=True))[0].steps_done == 2


@pytest.mark.exhaustive
def test_a_loss_that_is_no_number_ends_the_run_with_a_remedy(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors")
    first = QuietReport()
    run_adapter(chosen, first, lambda: len(first.lines) >= 1)
    state = torch.load(chosen.folder / "state.pt", weights_only=True)
    state["state"]["factors"][1].fill_(torch.nan)
    torch.save(state, chosen.folder / "state.pt")
    before = chosen.output.read_bytes()
    with pytest.raises(NumericalError, match=r"the loss at step 4 is not a finite number; .* lower --lr"):
        run(replace(chosen, resume=True))
    assert chosen.output.read_bytes() == before


def test_a_run_stopped_before_its_first_step_writes_no_adapter_and_can_be_resumed(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", steps=1)
    done, _ = run(chosen, lambda: True)
    assert (done.step, done.ending, chosen.output.exists()) == (0, "interrupted", False)
    assert run(replace(chosen, resume=True))[0].step == 1


def test_resuming_a_finished_run_changes_nothing(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", steps=2)
    done, _ = run(chosen)
    before = chosen.output.read_bytes()
    again, report = run(replace(chosen, resume=True))
    assert (again.ending, again.val_loss, report.lines) == (done.ending, done.val_loss, [])
    assert chosen.output.read_bytes() == before


def test_training_ends_early_when_it_no_longer_helps_and_keeps_the_best(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", lr=0.5, steps=40, val_every=1, patience=2, warmup_steps=0)
    done, report = run(chosen)
    losses = [line.val_loss for line in report.lines if line.val_loss is not None]
    assert done.ending == "it no longer got better"
    assert done.steps_done < 40
    assert done.step == 1 + losses.index(min(losses)) == done.steps_done - 2
    task, _, val, loaded = task_of(chosen)
    assert task.judge(val, loaded_adapter(chosen.output, loaded), 2) == pytest.approx(min(losses), rel=1e-5)


def test_a_time_limit_stops_and_can_be_resumed(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", steps=1000, max_seconds=0.1)
    done, _ = run(chosen)
    assert done.ending == "the time is up"
    assert 0 < done.steps_done < 1000
    assert done.val_loss is not None
    assert run(replace(chosen, resume=True))[0].steps_done > done.steps_done


def test_without_pictures_to_judge_by_the_last_adapter_is_kept(data: Path, tmp_path: Path) -> None:
    chosen = options(data, tmp_path / "a.safetensors", val_share=0.0, steps=3)
    done, report = run(chosen)
    assert (done.step, done.val_loss) == (3, None)
    assert all(line.val_loss is None for line in report.lines)
    assert report.begun[0].num_val_tasks == 0


@pytest.mark.exhaustive
def test_pictures_beyond_the_memory_bound_are_computed_again_with_the_same_result(data: Path, tmp_path: Path) -> None:
    kept, none = (options(data, tmp_path / f"{mb}.safetensors", steps=2, picture_memory_mb=mb) for mb in (64, 0))
    assert run(kept)[1].num_pictures == 4
    assert run(none)[1].num_pictures == 0
    assert_same_file(kept.output, none.output)


def test_every_pass_has_all_rows_in_an_order_of_its_own() -> None:
    order = RowOrder(6, 4, seed=1)
    places = [index for step in range(3) for index in order.batch(step)]
    assert sorted(places[:6]) == sorted(places[6:]) == list(range(6))
    assert places[:6] != places[6:]
    assert [RowOrder(6, 4, seed=1).batch(step) for step in (2, 0)] == [places[8:], places[:4]]
    assert places != [index for step in range(3) for index in RowOrder(6, 4, seed=2).batch(step)]


def test_the_rate_warms_up_and_follows_a_half_cosine() -> None:
    plan = LoopPlan(
        steps=100, steps_between_looks=10, batch_size=1, lr=1.0, final_lr=0.2, warmup_steps=10, weight_decay=0.0,
        clip_norm=1.0, patience=0, max_seconds=1.0, log_every=1, seed=0,
    )  # fmt: skip
    assert plan.lr_at(0) == pytest.approx(0.1)
    assert plan.lr_at(50) == pytest.approx(0.6)
    assert plan.lr_at(100) == pytest.approx(0.2)


def test_a_rank_that_experts_cannot_share_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank: must be a multiple of 3: a token's 3 experts share it \(got 4\)"):
        run(options(data, tmp_path / "a.safetensors", rank=4))
    done, _ = run(options(data, tmp_path / "a.safetensors", rank=4, targets="qkv,proj", steps=1))
    assert done.steps_done == 1
