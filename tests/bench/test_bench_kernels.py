"""The benchmark of kernels: what it counts, what it says without a GPU, and that it notices a wrong kernel."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kestrel.bench.kernels import measure
from kestrel.bench.kernels.case import Case, Sizes, full_sizes, small_sizes
from kestrel.bench.kernels.measure import Ceilings, Timed, all_cases, check_kernels, num_copies
from kestrel.cli.app import run
from kestrel.errors import ConfigError

without_gpu = pytest.mark.skipif(DEVICES == ["cuda"], reason="this machine has a GPU")


def case_of(op: str, part_of_size: str) -> Case:
    return next(case for case in all_cases(full_sizes(), [op]) if part_of_size in case.size)


def test_decode_attention_of_64_rows_reads_the_keys_and_values_of_all_of_them() -> None:
    case = case_of("attend_rows", "64 rows of 770 keys")
    assert case.bytes_moved == 2 * 64 * 770 * 32 * 64 * 2 + 2 * 64 * 2048 * 2
    assert case_of("attend_rows", "64 rows of 770 keys, fp8").bytes_moved < 0.51 * case.bytes_moved


def test_prefill_attention_counts_the_pairs_that_the_mask_leaves() -> None:
    pairs = 730 * 730 + sum(730 + i + 1 for i in range(20))
    both = case_of("attend_chunks", "4 prompts, 730 after 0 and 20 after 730")
    assert both.flop == 4 * 32 * 2 * (2 * pairs * 64)
    assert both.bytes_moved == 2 * 4 * 750 * 2048 * 2 + 2 * 4 * 750 * 2048 * 2


def test_attention_inside_a_crop_counts_both_products() -> None:
    assert case_of("attend_crops", "36 crops").flop == 36 * 16 * 2 * (2 * 729 * 729 * 72)


def test_one_token_touches_its_own_experts_and_a_prompt_touches_all() -> None:
    expert_bytes = 3 * 1024 * 2048 * 2
    assert round(case_of("moe_small", "1 tokens").bytes_moved / expert_bytes) == 8
    assert round(case_of("moe_grouped", "3000 tokens").bytes_moved / expert_bytes) == 64 + 2


def test_inputs_rotate_until_they_exceed_the_cache() -> None:
    assert num_copies(2**30) == 2
    assert num_copies(100 * 2**20) * 100 >= 300
    assert num_copies(1) == 64


def test_a_row_says_time_over_work_against_the_ceilings() -> None:
    case = replace(case_of("layer_norm", "6561x1152"), bytes_moved=2_000_000, flop=4_000_000)
    row = Timed(case, plain_s=4e-6, triton_s=2e-6, distance=0.0, ceilings=Ceilings(4e12, 8e14)).columns()
    assert (row["speedup"], row["tb_per_s"], row["tflop_per_s"]) == pytest.approx((2.0, 1.0, 2.0))
    assert (row["bandwidth_share"], row["compute_share"]) == pytest.approx((0.25, 0.0025))


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = all_cases(small_sizes(), ["layer_norm"])[0]

    def off_by_three_percent(*arguments: object) -> object:
        return right.plain(*arguments) * 1.03  # pyright: ignore[reportOperatorIssue]

    def cases(sizes: Sizes, ops: list[str] | None) -> list[Case]:
        return [right, replace(right, triton=off_by_three_percent)]

    monkeypatch.setattr(measure, "all_cases", cases)
    assert [c.is_close for c in check_kernels(None, torch.device(DEVICES[0]))] == [True, False]


def test_a_name_that_is_no_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="moe_smal"):
        all_cases(small_sizes(), ["moe_smal"])


@pytest.mark.parametrize("other", [["--sweep"], ["--output", "kernels.csv"]])
def test_checking_goes_with_nothing_that_times(other: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--check", *other]) == 2
    assert other[0] in capfd.readouterr().err


def test_every_case_names_block_sizes_to_try_and_they_differ() -> None:
    for case in all_cases(full_sizes(), None):
        # Those of the vendor's products are found on a GPU.
        assert callable(case.tunings) or len(set(case.tunings)) == len(case.tunings) > 1


@without_gpu
@pytest.mark.parametrize("flags", [[], ["--sweep"]])
def test_timing_without_a_gpu_says_what_is_missing(
    flags: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "kernels.csv"
    assert run(["bench", "kernels", *flags, "--output", str(output)]) == 2
    assert "no NVIDIA GPU" in capfd.readouterr().err
    assert not output.exists()


@without_gpu
@pytest.mark.parametrize(
    "ops",
    [
        ["layer_norm", "attend_crops"],
        ["rms_norm", "add_rms_norm", "silu_gate", "rms_norm_to_fp8", "add_rms_norm_to_fp8", "silu_gate_to_fp8"],
        ["moe_mlp_adapted", "add_deltas", "small_adapted_linear"],
    ],
)
def test_checking_runs_the_named_kernels_once(ops: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--check", "--ops", ",".join(ops)]) == 0
    lines = [line.split()[0] for line in capfd.readouterr().out.splitlines() if "close" in line]
    assert sorted(lines) == sorted(case.op for case in all_cases(small_sizes(), ops))
    assert set(lines) == set(ops)
