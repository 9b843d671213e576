"""oneDNN is off inside steps of few rows on processors where it begins slowly, and as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import mkldnn

from kestrel.runtime import device as module
from kestrel.runtime.device import MOST_ROWS, few_rows
from tests.moondream.coarse import coarse
from tests.runtime.paged import RecordingDecoder, paged
from tests.runtime.test_paged_equality import all_skills

CPU, FP32 = torch.device("cpu"), torch.float32
BEGINS_SLOWLY = module.begins_slowly


@pytest.fixture(autouse=True)
def _slow_to_begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "begins_slowly", lambda dtype: True)
    before, mkldnn.enabled = mkldnn.enabled, True
    yield
    mkldnn.enabled = before


@pytest.mark.parametrize("was_on", [True, False])
def test_the_last_one_out_turns_it_back(was_on: bool) -> None:
    mkldnn.enabled = was_on
    first, second = few_rows(CPU, FP32, 1), few_rows(CPU, FP32, MOST_ROWS)
    first.__enter__()
    assert mkldnn.enabled is False
    second.__enter__()
    first.__exit__(None, None, None)
    assert mkldnn.enabled is False
    second.__exit__(None, None, None)
    assert mkldnn.enabled is was_on


def test_a_step_that_fails_turns_it_back() -> None:
    with pytest.raises(ValueError, match="broken"), few_rows(CPU, FP32, 1):
        raise ValueError("broken")
    assert mkldnn.enabled is True


@pytest.mark.parametrize(("device", "num_rows"), [(CPU, MOST_ROWS + 1), (torch.device("cuda"), 1)])
def test_long_steps_and_other_devices_are_left_alone(device: torch.device, num_rows: int) -> None:
    with few_rows(device, FP32, num_rows):
        assert mkldnn.enabled is True


@pytest.mark.parametrize(
    ("machine", "has_bfloat16", "dtype", "is_slow"),
    [
        ("x86_64", False, FP32, False),
        ("aarch64", False, FP32, True),
        ("aarch64", True, FP32, True),
        ("aarch64", False, torch.bfloat16, True),
        ("aarch64", True, torch.bfloat16, False),
    ],
)
def test_it_is_slow_to_begin_on_arm_but_for_bfloat16_that_it_multiplies_itself(
    machine: str, has_bfloat16: bool, dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module, "has_fast_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(module, "begins_slowly", BEGINS_SLOWLY)
    monkeypatch.setattr(module.mkldnn, "is_available", lambda: True)
    with few_rows(CPU, dtype, 1):
        assert mkldnn.enabled is not is_slow


def test_pictures_run_with_it_and_tokens_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    forward = RecordingDecoder.forward

    def noted(self: RecordingDecoder, x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append((len(x), mkldnn.enabled))
        return forward(self, x, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(RecordingDecoder, "forward", noted)
    g = coarse("md2")
    paged(g.model).run(all_skills(g, "a")[0])
    assert [enabled for _, enabled in seen] == [num_rows > MOST_ROWS for num_rows, _ in seen]
    assert {enabled for _, enabled in seen} == {True, False}
