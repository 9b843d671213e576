"""Linear layers for a handful of rows as Triton kernels against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from typing import Any

import pytest
import torch

from kestrel.kernels.fp8 import fp8_linear, rows_to_fp8, weights_to_fp8
from kestrel.kernels.linear import gated_linear as plain_gated
from kestrel.kernels.linear import small_linear as plain
from kestrel.kernels.triton import ops as bundle
from kestrel.kernels.triton.launch import NO_TABLE
from kestrel.kernels.triton.linear import Tuning, gated_linear, small_fp8_linear, small_linear

SHAPES = [(1, 48, 64), (1, 7, 100), (2, 5, 33), (4, 32, 128), (5, 40, 72), (16, 32, 128), (13, 3, 5), (0, 8, 16)]


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_plain_version(shape: tuple[int, int, int], device: str) -> None:
    num_rows, num_out, num_in = shape
    draw = Draw(device)
    x, weight = draw(num_rows, num_in), draw(num_out, num_in)
    expected = plain(x.double(), weight.double()).float()
    torch.testing.assert_close(small_linear(x, weight), expected, rtol=1e-5, atol=2e-5)


@devices
@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("has_gelu", [False, True])
def test_bias_activation_and_residual_follow(has_gelu: bool, num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight, bias, residual = draw(num_rows, 40), draw(24, 40), draw(24), draw(num_rows, 24)
    wide = [t.double() for t in (x, weight, bias, residual)]
    got = small_linear(x, weight, bias, residual, has_gelu)
    expected = plain(wide[0], wide[1], wide[2], wide[3], has_gelu).float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@devices
@pytest.mark.parametrize("num_rows", [1, 8])
def test_weights_of_float8_are_read_with_a_scale_per_output(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight, scale = draw(num_rows, 32), draw(20, 32).to(torch.float8_e4m3fn), draw(20)
    expected = plain(x.double(), weight.double() * scale.double()[:, None]).float()
    torch.testing.assert_close(small_linear(x, weight, scale_F=scale), expected, rtol=1e-5, atol=2e-5)


@devices
@pytest.mark.parametrize("num_rows", [1, 8])
def test_rows_of_half_precision_take_weights_of_float8_as_they_are(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight, scale = draw(num_rows, 256).to(HALF[device]), draw(20, 256).to(torch.float8_e4m3fn), draw(20)
    exact = plain(x.double(), weight.double() * scale.double()[:, None])
    # Nothing but the result is rounded.
    torch.testing.assert_close(small_linear(x, weight, scale_F=scale).double(), exact, rtol=5e-3, atol=1e-4)


@devices
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 80, 512), (2, 64, 256), (3, 128, 2048)])
def test_rows_of_float8_are_multiplied_in_float8(shape: tuple[int, int, int], has_bias: bool, device: str) -> None:
    num_rows, num_out, num_in = shape
    draw = Draw(device)
    bias = draw(num_out) if has_bias else None
    given = *rows_to_fp8(draw(num_rows, num_in)), *weights_to_fp8(draw(num_out, num_in)), bias, torch.float32
    expected = fp8_linear(*given)
    # On a GPU the tensor cores' sums of float8 keep 14 bits, as in the library's product.
    atol = 2e-3 * float(expected.abs().max()) if device == "cuda" and expected.numel() else 1e-4
    torch.testing.assert_close(small_fp8_linear(*given), expected, rtol=1e-4, atol=atol)


@devices
def test_rows_of_float8_give_half_precision_with_a_bias_of_it(device: str) -> None:
    draw, half = Draw(device), HALF[device]
    given = *rows_to_fp8(draw(5, 512)), *weights_to_fp8(draw(128, 512)), draw(128).to(half)
    expected = fp8_linear(*given, torch.float32)
    got = small_fp8_linear(*given, half)
    assert got.dtype is half
    torch.testing.assert_close(got.float(), expected, rtol=2.0**-7, atol=2e-3 * float(expected.abs().max()))


@devices
@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_the_bundle_multiplies_few_rows_of_float8_with_it(
    num_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spied(*given: Any, **more: Any) -> torch.Tensor:
        seen.append(len(given[0]))
        return small_fp8_linear(*given, **more)

    monkeypatch.setattr(bundle, "small_fp8_linear", spied)
    ops, draw = bundle.triton_ops(NO_TABLE, max_small_fp8_rows=16), Draw(device)
    given = *rows_to_fp8(draw(num_rows, 64)), *weights_to_fp8(draw(32, 64)), None
    expected = fp8_linear(*given, torch.float32)
    got = ops.fp8_linear(*given, HALF[device])
    torch.testing.assert_close(got.float(), expected, rtol=2.0**-7, atol=2e-3 * float(expected.abs().max()))
    assert ops.max_small_fp8_rows == 16
    assert seen == ([] if num_rows == 17 else [num_rows])


@devices
@pytest.mark.parametrize("num_rows", [1, 16])
def test_rows_may_be_columns_of_a_wider_tensor(num_rows: int, device: str) -> None:
    draw = Draw(device)
    wide, weight = draw(num_rows, 96), draw(16, 32)
    got = small_linear(wide[:, 64:], weight, residual_MF=wide[:, 16:32])
    assert torch.equal(got, small_linear(wide[:, 64:].contiguous(), weight, residual_MF=wide[:, 16:32].contiguous()))


@devices
@pytest.mark.parametrize("num_rows", [1, 16])
def test_weights_may_be_columns_of_a_wider_matrix(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, wide = draw(num_rows, 32), draw(16, 96)
    assert torch.equal(small_linear(x, wide[:, 64:]), small_linear(x, wide[:, 64:].contiguous()))
    assert torch.equal(gated_linear(x, wide[:, 64:]), gated_linear(x, wide[:, 64:].contiguous()))


@devices
@pytest.mark.parametrize("num_rows", [1, 6])
def test_some_rows_may_get_their_activation_elsewhere(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight, bias = draw(num_rows, 40), draw(24, 40), draw(24)
    wants = torch.arange(num_rows, device=device) % 2 == 1
    given, active = (small_linear(x, weight, bias, has_gelu=has_gelu) for has_gelu in (False, True))
    got = small_linear(x, weight, bias, has_gelu=True, gelu_rows_M=wants)
    assert torch.equal(got, torch.where(wants[:, None], active, given))


def test_a_product_that_runs_beside_others_has_blocks_of_its_own() -> None:
    assert Tuning.of(1, 2048, 8192, is_beside=True) != Tuning.of(1, 2048, 8192)


@devices
@pytest.mark.parametrize("num_rows", [1, 16])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(num_rows: int, device: str) -> None:
    draw = Draw(device, HALF[device])
    given: list[Any] = [draw(num_rows, 256), draw(64, 256, scale=0.1), draw(64), draw(num_rows, 64), True]
    exact = plain(*(g.double() if isinstance(g, torch.Tensor) else g for g in given))
    assert distance(small_linear(*given), exact) <= 1.05 * distance(plain(*given), exact)


@pytest.mark.parametrize(
    ("shape", "block_out"),
    [((1, 2048, 10240), 1), ((16, 14336, 2048), 64), ((16, 6144, 2048), 32), ((8, 2048, 8192), 16)],
)
def test_outputs_are_shared_out_so_that_all_multiprocessors_work(shape: tuple[int, int, int], block_out: int) -> None:
    assert Tuning.of(*shape).block_out == block_out


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_normalised_before_the_product(shape: tuple[int, int, int], device: str) -> None:
    num_rows, num_out, num_in = shape
    draw = Draw(device)
    x, weight, norm, residual = draw(num_rows, num_in), draw(num_out, num_in), draw(num_in), draw(num_rows, num_out)
    expected = plain(x.double(), weight.double(), residual_MF=residual.double(), norm=(norm.double(), 1e-5)).float()
    got = small_linear(x, weight, residual_MF=residual, norm=(norm, 1e-5))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-5)


@devices
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_products_are_those_of_the_plain_version(
    shape: tuple[int, int, int], has_norm: bool, device: str
) -> None:
    num_rows, num_out, num_in = shape
    draw = Draw(device)
    x, weight, norm = draw(num_rows, num_in), draw(2 * num_out, num_in, scale=0.3), draw(num_in)
    expected = plain_gated(x.double(), weight.double(), norm=(norm.double(), 1e-5) if has_norm else None).float()
    got = gated_linear(x, weight, norm=(norm, 1e-5) if has_norm else None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("num_rows", [17, 40, 64])
def test_gated_products_of_many_rows_are_those_of_the_plain_version(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight = draw(num_rows, 96), draw(2 * 80, 96, scale=0.3)
    expected = plain_gated(x.double(), weight.double()).float()
    torch.testing.assert_close(gated_linear(x, weight), expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("num_rows", [1, 8])
def test_gated_weights_of_float8_are_read_with_a_scale_per_output(num_rows: int, device: str) -> None:
    draw = Draw(device)
    x, weight, scale = draw(num_rows, 32), draw(40, 32).to(torch.float8_e4m3fn), draw(40)
    expected = plain_gated(x.double(), weight.double() * scale.double()[:, None]).float()
    torch.testing.assert_close(gated_linear(x, weight, scale), expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_gated_half_precision_is_no_further_from_the_truth_than_the_plain_version(num_rows: int, device: str) -> None:
    draw = Draw(device, HALF[device])
    x, weight, norm = draw(num_rows, 256), draw(128, 256, scale=0.1), draw(256)
    exact = plain_gated(x.double(), weight.double(), norm=(norm.double(), 1e-5))
    got, usual = (run(x, weight, norm=(norm, 1e-5)) for run in (gated_linear, plain_gated))
    assert distance(got, exact) <= 1.05 * distance(usual, exact)


@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("num_in", [2048, 4096])
@pytest.mark.parametrize("num_out", [64, 1536, 8192, 14336])
@pytest.mark.parametrize("is_gated", [False, True])
def test_blocks_of_half_precision_fit_the_shared_memory(
    num_out: int, num_in: int, is_gated: bool, has_room: bool
) -> None:
    tuning = Tuning.of(16, num_out, num_in, is_gated=is_gated, has_room=has_room)
    # As the compiler reports it: products of narrow blocks go by an older way, which needs a buffer less.
    buffers = tuning.num_stages - (tuning.block_out < 64)
    taken = buffers * 2 * tuning.block_in * (tuning.block_out * (1 + is_gated) + 16)
    assert taken <= (225 if has_room else 99) * 1024
