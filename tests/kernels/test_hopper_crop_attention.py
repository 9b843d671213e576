"""Attention inside crops as a Hopper kernel against the plain version, and who gets it."""

from __future__ import annotations

from tests.kernels.triton_mode import Draw, distance  # isort: skip - before any kernel

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton

from kestrel.kernels.triton import vision
from kestrel.kernels.triton.vision import attend_crops_on_hopper, fastest_attend_crops
from kestrel.kernels.vision import attend_crops as plain
from kestrel.runtime.device import computing

BF16 = torch.bfloat16
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == vision.HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")
CASES = {
    "one position": (1, 1, 1, 72),
    "a group of queries": (1, 64, 1, 72),
    "a block of keys": (2, 128, 2, 72),
    "one key past a block": (2, 129, 2, 72),
    "one query past a tile": (3, 193, 1, 72),
    "a head that fills its tiles": (2, 100, 3, 80),
    "more tiles than programs": (9, 300, 16, 72),
    "several tiles a program, one block of keys": (40, 100, 16, 72),
    "several tiles a program, two blocks of keys": (20, 200, 16, 72),
    "crops of Moondream": (5, 729, 16, 72),
}


def drawn(num_crops: int, num_rows: int, heads: int, head_dim: int) -> torch.Tensor:
    return Draw("cuda", BF16)(num_crops, num_rows, 3 * heads * head_dim)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", CASES)
def test_it_is_no_further_from_the_truth_than_the_plain_version(case: str) -> None:
    from kestrel.kernels.triton.hopper_crop_attention import attend_crops  # noqa: PLC0415 - where Triton has it

    heads, qkv = CASES[case][2], drawn(*CASES[case])
    exact = plain(qkv.double(), heads)
    assert distance(attend_crops(qkv, heads), exact) <= 1.05 * distance(plain(qkv, heads), exact)


@pytest.mark.gpu
@on_hopper
def test_another_crop_does_no_harm_whatever_its_numbers_are() -> None:
    qkv = drawn(3, 729, 2, 72)
    expected = attend_crops_on_hopper(qkv, 2)
    qkv[[0, 2]] = float("nan")
    assert torch.equal(attend_crops_on_hopper(qkv, 2)[1], expected[1])


@pytest.mark.gpu
@on_hopper
def test_it_gives_the_same_bits_every_time_and_in_a_graph() -> None:
    """A barrier in the wrong place shows now and then only."""
    qkv = drawn(20, 729, 16, 72)
    expected = attend_crops_on_hopper(qkv, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_crops_on_hopper(qkv, 16)
    for _ in range(300):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (88, BF16), (72, torch.float32), (68, BF16)])
def test_what_the_kernel_does_not_take_goes_to_torch(head_dim: int, dtype: torch.dtype) -> None:
    qkv = Draw("cuda", dtype)(2, 50, 3 * 2 * head_dim)
    assert torch.equal(attend_crops_on_hopper(qkv, 2), plain(qkv, 2))


@pytest.mark.gpu
@on_hopper
def test_a_hopper_gpu_gets_it(caplog: pytest.LogCaptureFixture) -> None:
    assert fastest_attend_crops((9, 0)) is attend_crops_on_hopper
    assert not caplog.records


def test_other_gpus_keep_the_vendors_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert fastest_attend_crops((8, 0)) is plain
    assert fastest_attend_crops((10, 0)) is plain
    assert not caplog.records


def broken(*_: Any) -> torch.Tensor:
    raise RuntimeError("the compiler says\nno such layout")


def wrong(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    return 1.1 * plain(qkv, heads)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(broken, "RuntimeError: no such layout"), (wrong, "its result is 0.1 from the right one")],
)
def test_where_it_fails_the_log_says_why_and_torch_does_it(
    kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vision, "attend_crops_on_hopper", kernel)
    monkeypatch.setattr(vision, "DEVICE", "cpu")
    with caplog.at_level(logging.WARNING), computing(torch.device("cpu"), BF16):
        assert fastest_attend_crops((9, 0)) is plain
    (line,) = caplog.messages
    assert line == f"attention of crops runs in torch, without the Hopper kernel: {reason}"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from kestrel.kernels.triton import hopper_crop_attention as hopper

main, rest = (hopper.gl.NVMMASharedLayout(swizzle, 16, rank=4) for swizzle in (128, 32))
widths = ((64, main), (16, rest))
tiles = [f"tensordesc<bf16[1, {rows}, 1, {width}],{layout!r}>" for rows in (64, 128, 64) for width, layout in widths]
signature = dict(zip(hopper._attend_crops.arg_names, [*tiles, *["i32"] * 5, "fp32"], strict=True))
source = GluonASTSource(hopper._attend_crops, signature, {}, {})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 128})
print("wgmma.mma_async" in made.asm["ptx"], len(made.asm["cubin"]) > 0)
"""


@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6), reason="needs Triton 3.6")
@pytest.mark.exhaustive
def test_it_compiles_for_hopper_on_any_machine() -> None:
    """In a process of its own, since the interpreter that other tests run kernels in is chosen at the import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["True", "True"], done.stderr[-3000:]
