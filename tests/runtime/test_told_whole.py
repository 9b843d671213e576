"""A step that is told whole is collected behind all its work, whatever of it came first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kestrel.grammar import free_text
from kestrel.runtime import executor as executor_module
from kestrel.runtime.contract import DecodeRow, PageWrite, PictureSlice, PrefillChunk, RowStart, RuntimeLimits, StepPlan
from kestrel.runtime.executor import Executor
from kestrel.runtime.pictures import SlicedPictures
from kestrel.settings import SamplingParams
from kestrel.tokens import TextToken
from tests.moondream.goldens import golden
from tests.runtime.paged import RecordingDecoder, fixed_decode

LIMITS = RuntimeLimits(2, 64, num_pages=40, page_size=4, max_prefill_tokens=32, steps_in_flight=1)


class Notes(list[str]):
    """What was launched and waited for, in order; also the event at the end of a step."""

    def synchronize(self) -> None:
        self.append("waited")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    run_flat = Executor._run_flat

    def noted_flat(executor: Executor, *work: Any) -> None:
        run_flat(executor, *work)
        notes.append("prefill")

    def noted_end(device: torch.device) -> Notes:
        notes.append("end")
        return notes

    monkeypatch.setattr(Executor, "_run_flat", noted_flat)
    monkeypatch.setattr(SlicedPictures, "advance", lambda *_: notes.append("slice"))
    monkeypatch.setattr(executor_module, "end_of_work", noted_end)
    monkeypatch.setattr(executor_module, "read_part", lambda *_: notes.append("read"))
    return notes


def run(runtime: Executor, plan: StepPlan) -> None:
    runtime.collect(runtime.launch(plan))


def prefill(row: int, samples: bool) -> PrefillChunk:
    return PrefillChunk(row, 0, [TextToken(3), TextToken(4)], 2, samples)


def started() -> tuple[Executor, StepPlan]:
    """A runtime with fixed sizes of decoding, and the plan that starts two rows and gives the first one a token."""
    with torch.inference_mode():
        runtime = Executor(RecordingDecoder(golden("md2").model), LIMITS, make_fast_steps=fixed_decode)
    starts = [RowStart(row, free_text(319), SamplingParams(max_new_tokens=9), max_total_tokens=9) for row in (0, 1)]
    pages = [PageWrite(row, 0, (2 * row, 2 * row + 1)) for row in (0, 1)]
    return runtime, StepPlan(0, starts=starts, page_writes=pages, prefill=[prefill(0, samples=True)])


def test_it_is_collected_behind_its_slices_and_its_prefill(notes: Notes) -> None:
    runtime, first = started()
    run(runtime, first)
    notes.clear()
    slices = [PictureSlice("feed", None, 1)]
    plan = StepPlan(1, decode=[DecodeRow(0, 2)], prefill=[prefill(1, samples=False)], picture_slices=slices)
    plan.is_told_whole = True
    run(runtime, plan)
    assert notes == ["slice", "prefill", "end", "waited", "read"]


def test_other_steps_are_collected_as_soon_as_their_tokens_are_known(notes: Notes) -> None:
    runtime, first = started()
    run(runtime, first)
    run(runtime, StepPlan(1, decode=[DecodeRow(0, 2)], prefill=[prefill(1, samples=False)]))
    assert notes == ["prefill", "read", "prefill", "read"]
