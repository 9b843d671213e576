"""Products by named algorithms of cuBLASLt equal torch's, and torch's run wherever no algorithm is named or suits."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel.kernels import cublaslt
from kestrel.kernels.cublaslt import Algorithm, Offer, split
from kestrel.kernels.fp8 import rows_to_fp8, weights_to_fp8
from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.launch import TunedSize, TuningTable, fine_rows_range
from kestrel.kernels.triton.ops import TRITON, triton_ops

assert DEVICES
OPS = ("linear", "gelu_linear", "add_linear", "fp8_linear", "add_fp8_linear")
SOME = Algorithm(
    1, number=66, tile=20, stages=35, split_k=1, reduction=0, swizzle=0, option=1, inner_shape=0, cluster=2
)


def operands(device: str, rows: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator(device).manual_seed(7)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = (rows, num_in), (num_out, num_in), (num_out,)
    x, weight, bias = (torch.randn(size, generator=dice, device=device, dtype=torch.float32) for size in sizes)
    return x.to(dtype), (weight * num_in**-0.5).to(dtype), bias.to(dtype)


def arguments(op: str, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Any, ...]:
    in_fp8 = *rows_to_fp8(x), *weights_to_fp8(weight)
    if op == "fp8_linear":
        return *in_fp8, bias, x.dtype
    if op.startswith("add"):
        ones = torch.ones(len(x), len(weight), dtype=x.dtype, device=x.device)
        return (ones, x, weight) if op == "add_linear" else (ones, *in_fp8)
    return x, weight, bias


def offer(op: str, given: tuple[Any, ...]) -> Offer:
    if op == "fp8_linear":
        return Offer.of(op, given[0], given[2], given[4])
    if op == "add_fp8_linear":
        return Offer.of(op, given[1], given[3], None)
    x, weight, bias = (given[1], given[2], None) if op == "add_linear" else given
    return Offer.of(op, x, weight, bias)


def assert_equal(got: Tensor, expected: Tensor) -> None:
    distance = (got.double() - expected.double()).norm() / expected.double().norm()
    assert distance < (5e-3 if got.dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_without_a_table_the_result_is_that_of_the_plain_operation(op: str) -> None:
    device = DEVICES[0]
    x, weight, bias = operands(device, 5, 32, 16)
    got = getattr(TRITON, op)(*arguments(op, x, weight, bias))
    assert_equal(got, getattr(PLAIN, op)(*arguments(op, x, weight, bias)))


def test_what_a_table_has_for_another_version_of_the_library_is_not_used() -> None:
    device = DEVICES[0]
    x, weight, bias = operands(device, 64, 32, 16)
    ops = triton_ops(TuningTable({TunedSize("linear", 64, (32, 16), (x.dtype,)): SOME}))
    assert_equal(ops.linear(x, weight, bias), PLAIN.linear(x, weight, bias))


def test_ranges_of_rows_grow_by_quarters() -> None:
    ends = sorted({fine_rows_range(rows) for rows in range(1, 257)})
    assert ends == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160,
                    192, 224, 256]  # fmt: skip
    assert all(rows <= fine_rows_range(rows) < 1.26 * rows for rows in range(9, 70_000, 17))
    assert all(fine_rows_range(end) == end for end in map(fine_rows_range, range(1, 70_000, 31)))


# ---------------------------------------------------------------------- on a GPU


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations that a named algorithm has run."""
    seen: list[str] = []
    run: Callable[..., Tensor] = cublaslt._Plan.run

    def watched(self: cublaslt._Plan, *given: Any, **more: Any) -> Tensor:
        seen.append(self._problem.op)
        return run(self, *given, **more)

    monkeypatch.setattr(cublaslt._Plan, "run", watched)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", [(33, 512, 256), (729, 1152, 1152), (2187, 4304, 1152), (64, 2048, 8192)])
def test_every_guess_of_the_library_gives_the_right_result(
    op: str, sizes: tuple[int, int, int], spied: list[str]
) -> None:
    given = arguments(op, *operands("cuda", *sizes))
    guesses = offer(op, given).guessed()
    assert guesses or "fp8" in op, "for few rows and many inputs it has none in float8"
    for algorithm in guesses:
        expected = getattr(PLAIN, op)(*arguments(op, *operands("cuda", *sizes)))
        fresh = arguments(op, *operands("cuda", *sizes))
        assert_equal(getattr(cublaslt, op)(*fresh, tuning=algorithm), expected)
    assert spied == [op] * len(guesses)


@pytest.mark.gpu
def test_float8_rows_that_the_library_has_nothing_for_are_multiplied_all_the_same() -> None:
    given = arguments("fp8_linear", *operands("cuda", 32, 2048, 8192))
    assert_equal(TRITON.fp8_linear(*given), PLAIN.fp8_linear(*given))


@pytest.mark.gpu
def test_a_float8_product_is_added_in_place_without_a_table_too(spied: list[str]) -> None:
    for sizes in (729, 1152, 4304), (32, 2048, 8192):
        given, expected = (arguments("add_fp8_linear", *operands("cuda", *sizes)) for _ in range(2))
        got = TRITON.add_fp8_linear(*given)
        assert got.data_ptr() == given[0].data_ptr()
        assert_equal(got, PLAIN.add_fp8_linear(*expected))
    assert spied == ["add_fp8_linear"] * 2


@pytest.mark.gpu
def test_other_tiles_clusters_and_splits_give_it_too(spied: list[str]) -> None:
    x, weight, bias = operands("cuda", 200, 768, 1024)
    offered = Offer.of("linear", x, weight, bias)
    tiles = offered.with_every_tile(offered.guessed()[0])
    assert len(tiles) > 100
    parted = [one for base in tiles[::40] for one in (split(base, 3), replace(base, cluster=3)) if offered.has(one)]
    assert len({one.split_k for one in parted}) == 2
    expected = PLAIN.linear(x, weight, bias)
    for algorithm in (*tiles[::10], *parted):
        assert_equal(TRITON.linear(x, weight, bias, tuning=algorithm), expected)
    assert len(spied) == len(tiles[::10]) + len(parted)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_table_names_the_algorithm_also_inside_a_graph(op: str, spied: list[str]) -> None:
    given = arguments(op, *operands("cuda", 100, 512, 256))
    chosen = offer(op, given).guessed()[-1]
    dtype = torch.float8_e4m3fn if "fp8" in op else torch.bfloat16
    ops = triton_ops(TuningTable({TunedSize(op, 112, (512, 256), (dtype,)): chosen}))
    run, graph = getattr(ops, op), torch.cuda.CUDAGraph()
    expected = getattr(PLAIN, op)(*arguments(op, *operands("cuda", 100, 512, 256)))
    run(*arguments(op, *operands("cuda", 100, 512, 256)))
    with torch.cuda.graph(graph):
        got = run(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(got, expected)
    assert spied == [op, op]


@pytest.mark.gpu
def test_columns_of_a_wider_matrix_are_read_where_they_lie(spied: list[str]) -> None:
    x, weight, bias = operands("cuda", 96, 512, 1024)
    parts = x[:, 256:768], weight[:, 256:768]
    algorithm = Offer.of("linear", *parts, bias).guessed()[0]
    assert_equal(TRITON.linear(*parts, bias, tuning=algorithm), PLAIN.linear(*parts, bias))
    assert spied == ["linear"]


@pytest.mark.gpu
def test_what_does_not_suit_is_left_to_torch(spied: list[str]) -> None:
    x, weight, bias = operands("cuda", 96, 512, 1024)
    algorithm = Offer.of("linear", x, weight, bias).guessed()[0]
    odd = x[:, 1:513], weight[:, 1:513]
    cases = [odd, (x.float(), weight.float()), (x[:0], weight), (x.view(2, 48, 1024), weight)]
    for some_x, some_weight in cases:
        some_bias = bias.to(some_x.dtype)
        got = TRITON.linear(some_x, some_weight, some_bias, tuning=algorithm)
        assert torch.equal(got, PLAIN.linear(some_x, some_weight, some_bias))
    assert torch.equal(
        TRITON.linear(x, weight, bias, tuning=replace(algorithm, tile=99_999)), PLAIN.linear(x, weight, bias)
    )
    assert spied == []
