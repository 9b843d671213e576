"""Strict loading: everything wrong in one message, nothing read before, straight into type and place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo, open_checkpoint
from kestrel.models.strict_loading import LoadPlan, Source, check_plan, load_parameters, plain_source


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def saved(tmp_path: Path, **changes: torch.Tensor | None) -> Checkpoint:
    tensors = {name: torch.randn(p.shape) for name, p in meta_model().named_parameters()}
    tensors |= {name: value for name, value in changes.items() if value is not None}
    save_file({n: t for n, t in tensors.items() if changes.get(n, t) is not None}, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)


def plain_plan(checkpoint: Checkpoint) -> LoadPlan:
    problems: list[str] = []
    sources = {name: plain_source(name, info, problems) for name, info in checkpoint.tensors.items()}
    return LoadPlan(sources, (), problems)


def test_all_kinds_of_misfit_come_in_one_sorted_message(tmp_path: Path) -> None:
    wrong = {"0.bias": None, "1.weight": torch.zeros(2, 3), "z": torch.zeros(1), "y": torch.zeros(1)}
    checkpoint = saved(tmp_path, **wrong, **{"1.bias": torch.zeros(1, dtype=torch.int8)})
    with pytest.raises(CheckpointError) as caught:
        check_plan(plain_plan(checkpoint), meta_model(), "w.safetensors", "try another name")
    assert str(caught.value).split("\n  ") == [
        "w.safetensors does not fit the model:",
        "missing tensors (1): 0.bias",
        "unexpected tensors (2): y, z",
        "wrong shapes (1): 1.weight is [2, 3], expected [1, 3]",
        "problems (1): 1.bias is stored as int8 without scales; use an unquantised checkpoint",
        "try another name",
    ]


def test_a_long_listing_is_capped_with_a_count() -> None:
    sources = {f"extra{i:02d}": Source((f"extra{i:02d}",), (1,)) for i in range(20)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors \(20\): extra00, .*extra07, and 12 more"):
        check_plan(LoadPlan(sources), meta_model(), "w")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_get_values_type_and_no_gradient(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = saved(tmp_path)
    model = meta_model()
    load_parameters(model, checkpoint, plain_plan(checkpoint), torch.device("cpu"), lambda _: dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert not parameter.requires_grad
        assert torch.equal(parameter, checkpoint.read(name).to(dtype))


def test_progress_grows_to_the_bytes_of_the_loaded_model(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    calls: list[tuple[str, int, int]] = []
    load_parameters(
        meta_model(),
        checkpoint,
        plain_plan(checkpoint),
        torch.device("cpu"),
        lambda _: torch.bfloat16,
        lambda label, done_bytes, total_bytes: calls.append((label, done_bytes, total_bytes)),
    )
    done = [call[1] for call in calls]
    assert {call[2] for call in calls} == {2 * 13}
    assert {call[0] for call in calls} == {"loading weights"}
    assert done == sorted(done)
    assert (done[0], done[-1], len(done)) == (0, 26, 5)


def test_values_beyond_float16_are_refused_there_only(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, **{"0.bias": torch.tensor([0.0, 1e6, 0.0])})
    plan = plain_plan(checkpoint)
    load_parameters(meta_model(), checkpoint, plan, torch.device("cpu"), lambda _: torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"0\.bias .*float16; use dtype bfloat16"):
        load_parameters(meta_model(), checkpoint, plan, torch.device("cpu"), lambda _: torch.float16)


def test_float8_without_scales_is_a_problem() -> None:
    problems: list[str] = []
    plain_source("w", TensorInfo((2,), torch.float8_e4m3fn), problems)
    assert problems == ["w is stored as float8_e4m3fn without scales; use an unquantised checkpoint"]
