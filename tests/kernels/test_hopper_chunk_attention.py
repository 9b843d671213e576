"""Attention of prefill chunks as a Hopper kernel against the plain version, and who gets it."""

from __future__ import annotations

from tests.kernels.triton_mode import Draw, distance  # isort: skip - before any kernel

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kestrel.kernels.paged_attention import attend_chunks as plain
from kestrel.kernels.triton import paged_attention
from kestrel.kernels.triton.launch import HOPPER
from kestrel.kernels.triton.paged_attention import (
    LONG,
    attend_chunks,
    attend_chunks_on_hopper,
    fastest_attend_chunks,
)
from tests.kernels.page_orders import position_major
from tests.kernels.test_triton_chunk_attention import PICTURE, TEXT, Chunks, chunks_of

BF16 = torch.bfloat16
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")
MANY = [(0, 700, TEXT), (300, 513, TEXT), (0, 65, TEXT), (64, 0, TEXT), (0, 730, PICTURE), (730, 129, TEXT)]
CASES = {
    "one key more than a block": (1, 1, 64, 16, [(0, 129, TEXT)]),
    "a block and the end of a page": (2, 2, 64, 16, [(0, 128, TEXT), (0, 96, TEXT)]),
    "a picture": (2, 2, 64, 16, [(0, 730, PICTURE)]),
    "a picture after text": (2, 2, 64, 16, [(77, 100, PICTURE)]),
    "behind a long prefix": (4, 1, 128, 16, [(2000, 70, TEXT)]),
    "one head for each, 64": (3, 3, 64, 16, MANY),
    "one head for each, 128": (3, 3, 128, 16, MANY),
    "groups of four, 64": (8, 2, 64, 16, MANY),
    "groups of four, 128": (8, 2, 128, 16, MANY),
    "groups of three, 64": (9, 3, 64, 16, MANY),
    "groups of seven, 128": (7, 1, 128, 16, MANY),
    "large pages": (8, 2, 128, 64, MANY),
    "pages of three boxes": (4, 2, 64, 48, MANY),
    "more tiles than programs": (32, 8, 128, 16, [(0, 1500, TEXT)] * 3),
    "more tiles than programs, 64": (32, 8, 64, 16, [(0, 1500, TEXT), (700, 1100, TEXT), (5, 193, TEXT)]),
}


def drawn(case: str) -> Chunks:
    return chunks_of(*CASES[case], device="cuda", dtype=BF16)


def exact(given: Chunks) -> Tensor:
    q, k_cache, v_cache = (x.double() for x in (given.q, given.k_cache, given.v_cache))
    return plain(*replace(given, q=q, k_cache=k_cache, v_cache=v_cache).arguments())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_is_no_further_from_the_truth_than_the_plain_version(case: str, overlaps: bool) -> None:
    """The pages of no chunk, and what lies behind its last key, are full of NaN."""
    from kestrel.kernels.triton import hopper_chunk_attention as hopper  # noqa: PLC0415 - where Triton has it

    given, owned = drawn(case), drawn(case).owned()
    truth = exact(given)[owned]
    tuning = hopper.HopperTuning.of(given.q.shape[2], given.q.shape[1] // given.k_cache.shape[2])
    got = hopper.attend_chunks(*given.arguments(), tuning=replace(tuning, overlaps=overlaps))[owned]
    assert distance(got, truth) <= 1.05 * distance(plain(*given.arguments())[owned], truth)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", ["groups of four, 128", "more tiles than programs, 64"])
def test_it_gives_the_same_bits_every_time_and_in_a_graph_of_other_chunks(case: str) -> None:
    """A barrier in the wrong place shows now and then only."""
    given = drawn(case)
    owned, expected = given.owned(), attend_chunks_on_hopper(*given.arguments())
    held = replace(given, count=given.count * 0, start=given.start * 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_chunks_on_hopper(*held.arguments())
    held.count.copy_(given.count)
    held.start.copy_(given.start)
    for _ in range(300):
        got.zero_()
        graph.replay()
        assert torch.equal(got[owned], expected[owned])


@pytest.mark.gpu
@on_hopper
def test_queries_and_results_may_be_columns_of_a_wider_tensor_and_nothing_else_is_written() -> None:
    given = drawn("groups of four, 64")
    width = 8 * 64
    wide = Draw("cuda", BF16)(given.q.shape[0], 3 * width)
    wide[:, :width] = given.q.flatten(1)
    before = wide.clone()
    q, out = wide[:, :width].view(-1, 8, 64), wide[:, width : 2 * width].view(-1, 8, 64)
    assert attend_chunks_on_hopper(*replace(given, q=q).arguments(), out_THD=out) is out
    owned = given.owned()
    assert torch.equal(out[owned], attend_chunks_on_hopper(*given.arguments())[owned])
    before[owned, width : 2 * width] = wide[owned, width : 2 * width]
    assert torch.equal(wide, before)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", ["groups of four, 128", "pages of three boxes"])
def test_pages_may_lie_position_by_position(case: str) -> None:
    given, owned = drawn(case), drawn(case).owned()
    other = replace(given, k_cache=position_major(given.k_cache), v_cache=position_major(given.v_cache))
    assert torch.equal(
        attend_chunks_on_hopper(*other.arguments())[owned], attend_chunks_on_hopper(*given.arguments())[owned]
    )


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "page_size", "dtype", "count"), [
    (72, 16, BF16, 700), (64, 8, BF16, 700), (64, 16, torch.float32, 700), (64, 16, BF16, 640), (128, 16, BF16, 256),
])  # fmt: skip
def test_what_the_kernel_does_not_take_goes_to_the_portable_one(
    head_dim: int, page_size: int, dtype: torch.dtype, count: int
) -> None:
    given = chunks_of(2, 2, head_dim, page_size, [(5, count, TEXT)], device="cuda", dtype=dtype)
    owned = given.owned()
    assert torch.equal(attend_chunks_on_hopper(*given.arguments())[owned], attend_chunks(*given.arguments())[owned])


def test_only_hopper_gpus_get_it() -> None:
    assert fastest_attend_chunks((9, 0)) is attend_chunks_on_hopper
    assert fastest_attend_chunks((8, 0)) is attend_chunks
    assert fastest_attend_chunks((10, 0)) is attend_chunks


@pytest.fixture
def untried() -> Iterator[None]:
    paged_attention._is_right_on_hopper.cache_clear()
    yield
    paged_attention._is_right_on_hopper.cache_clear()


def test_where_it_fails_the_log_says_why_once_and_the_portable_one_does_it(
    untried: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU it cannot be launched."""
    if torch.cuda.is_available():
        pytest.skip("it runs here")
    given = chunks_of(1, 1, 128, 16, [(0, LONG[128] + 1, TEXT)], device="cpu", dtype=BF16)
    expected = attend_chunks(*given.arguments())[given.owned()]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(attend_chunks_on_hopper(*given.arguments())[given.owned()], expected)
    (line,) = caplog.messages
    assert line.startswith("attention of prompts runs without the Hopper kernel: ")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kestrel.kernels.triton import hopper_chunk_attention as hopper

boxes = [("64, 1, 64", 3), ("1, 1, 16, 64", 4), ("1, 1, 16, 64", 4)]
described = [f"tensordesc<bf16[{box}],{hopper.gl.NVMMASharedLayout(128, 16, rank=rank)!r}>" for box, rank in boxes]
kernel = hopper._attend_chunks
for head_dim, group in ((64, 4), (128, 4), (128, 1)):
    tuning = hopper.HopperTuning.of(head_dim, group)
    registers, loader_registers, average = hopper.REGISTERS[tuning.groups]
    fixed = dict(
        GROUP_SIZE=group, GROUPS=tuning.groups, SAME_QUERIES=tuning.same_queries, STAGES=tuning.stages,
        HALVES=head_dim // 64, PAGE_SIZE=16, OVERLAP=tuning.overlaps, REGISTERS=registers,
        LOADER_REGISTERS=loader_registers,
    )
    kinds = [*described, "*bf16", *["*i64"] * 5, *["i32"] * 5, "fp32", "fp32", *["constexpr"] * len(fixed)]
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(kernel, dict(zip(kernel.arg_names, kinds, strict=True)), places, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": average})
    print("wgmma.mma_async" in made.asm["ptx"], made.metadata.shared <= 227 * 1024)
"""


@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6), reason="needs Triton 3.6")
@pytest.mark.exhaustive
def test_it_compiles_for_hopper_on_any_machine() -> None:
    """In a process of its own, since the interpreter that other tests run kernels in is chosen at the import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done: Any = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split() == ["True", "True"] * 3, done.stderr[-3000:]
