"""The vendor's products of many rows, and the search for their algorithms.

cuBLASLt has a thousand ways to multiply two matrices. Each is timed once for a size; the best hundred are what other
sizes of the same matrix choose from. The few that come out best are then measured as block sizes of kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kestrel.bench.kernels.case import FP8_BYTES, HALF_BYTES, Case, Maker, Sizes
from kestrel.kernels import cublaslt
from kestrel.kernels.cublaslt import Algorithm, Offer, Refused, split
from kestrel.kernels.fp8 import rows_to_fp8, weights_to_fp8
from kestrel.kernels.ops import PLAIN

CLUSTERS = (2, 3, 4, 5)
"""One block, two or four in a column, two in a row, by the library's numbers; larger ones were never the best."""
SPLITS = (2, 3, 4, 6, 8)
MAX_SPLIT_ROWS = 512
"""Beyond, a product has tiles for all multiprocessors."""
LOOKED_AT, KEPT, GIVEN = 48, 100, 8
NEAR = 3.0
"""What was found for a size holds for up to so many times its rows."""
COLD_CALLS = 8
BATCH = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str
    op: str
    num_out: int
    num_in: int


def product_cases(sizes: Sizes) -> Iterator[Case]:
    """Matrix by matrix, rows rising, so that a search can go by the one before."""
    search, vision = ProductSearch(), sizes.vision
    for matrix in _encoder_matrices(sizes):
        for crops in sizes.product_crops:
            yield _product_case(matrix, crops * vision.num_patches, search)
    for matrix in _text_matrices(sizes):
        for rows in sizes.product_rows:
            if matrix.name != "head" or rows <= max(sizes.decode_rows):
                yield _product_case(matrix, rows, search)
    for matrix in _gated_matrices(sizes):
        for rows in sizes.gated_rows:
            yield _product_case(matrix, rows, search)


def _encoder_matrices(sizes: Sizes) -> Iterator[Matrix]:
    dim, ff_dim = sizes.vision.enc_dim, sizes.vision.enc_ff_dim
    matrices = (
        Matrix("qkv", "linear", 3 * dim, dim),
        Matrix("proj", "add_linear", dim, dim),
        Matrix("fc1", "gelu_linear", ff_dim, dim),
        Matrix("fc2", "add_linear", dim, ff_dim),
    )
    yield from matrices
    yield from _in_fp8(matrices)


def _text_matrices(sizes: Sizes) -> Iterator[Matrix]:
    text = sizes.text
    matrices = (
        Matrix("qkv", "linear", text.qkv_dim, text.dim),
        Matrix("proj", "linear", text.dim, text.dim),
        Matrix("fc1", "gelu_linear", text.ff_dim, text.dim),
        Matrix("fc2", "linear", text.dim, text.ff_dim),
    )
    yield from (*matrices, Matrix("head", "linear", text.vocab_size, text.dim))
    yield from _in_fp8(matrices)


def _gated_matrices(sizes: Sizes) -> Iterator[Matrix]:
    for dim, qkv_dim, ff_dim in sizes.gated_text:
        gated = (
            Matrix("qkv", "linear", qkv_dim, dim),
            Matrix("proj", "linear", dim, dim),
            Matrix("gate_up", "linear", 2 * ff_dim, dim),
            Matrix("down", "linear", dim, ff_dim),
        )
        yield from gated
        yield from _in_fp8(gated)


def _in_fp8(matrices: Iterable[Matrix]) -> Iterator[Matrix]:
    return (replace(matrix, op="add_fp8_linear" if _adds(matrix.op) else "fp8_linear") for matrix in matrices)


def _adds(op: str) -> bool:
    return op.startswith("add_")


def _is_fp8(op: str) -> bool:
    return op.endswith("fp8_linear")


def _product_case(matrix: Matrix, rows: int, search: ProductSearch) -> Case:
    op, num_out, num_in = matrix.op, matrix.num_out, matrix.num_in

    def make(maker: Maker) -> tuple[Any, ...]:
        x, weight = maker.numbers(rows, num_in), maker.numbers(num_out, num_in, scale=num_in**-0.5)
        bias = maker.numbers(num_out)
        factors = (*rows_to_fp8(x), *weights_to_fp8(weight)) if _is_fp8(op) else (x, weight)
        if _adds(op):
            return maker.numbers(rows, num_out), *factors
        return (*factors, bias, maker.dtype) if _is_fp8(op) else (*factors, bias)

    width = FP8_BYTES if _is_fp8(op) else HALF_BYTES
    return Case(
        op,
        f"{matrix.name}, {rows}x{num_in} to {num_out}",
        getattr(PLAIN, op),
        getattr(cublaslt, op),
        make,
        bytes_moved=width * (rows + num_out) * num_in + HALF_BYTES * (1 + _adds(op)) * rows * num_out,
        flop=2 * rows * num_out * num_in,
        tunings=search.of(op, rows, (num_out, num_in)),
    )


# ---------------------------------------------------------------------- the search


class ProductSearch:
    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[tuple[int, list[Algorithm]]]] = {}
        self._last: dict[str, Algorithm] = {}
        """Of each operation, for sizes that the library has no guess for."""

    def of(self, op: str, rows: int, dims: tuple[int, int]) -> Callable[..., tuple[Algorithm, ...]]:
        """What finds the algorithms of a product, given how it is run and sets of its arguments."""

        def found(run: Callable[..., object], inputs: Sequence[tuple[Any, ...]]) -> tuple[Algorithm, ...]:
            offer, known = Offer.of(op, *_operands(op, inputs[0])), self._known.setdefault((op, dims), [])
            guessed = offer.guessed()
            like = guessed[0] if guessed else self._last.get(op)
            if like is None:
                return ()
            self._last[op] = like
            near = next((pool for of_rows, pool in known if of_rows <= rows <= NEAR * of_rows), None)
            if near is None:
                times = _all_times(offer, like, guessed, rows, run, inputs)
                known.append((rows, _best(times, KEPT)))
            else:
                times = _times(run, inputs, [*guessed, *filter(offer.has, near)])
            return tuple(_best(times, GIVEN))

        return found


def _operands(op: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows, weight and bias."""
    if _adds(op):
        return arguments[1], arguments[3] if _is_fp8(op) else arguments[2], None
    return (arguments[0], arguments[2], arguments[4]) if _is_fp8(op) else arguments


def _all_times(
    offer: Offer,
    like: Algorithm,
    guessed: list[Algorithm],
    rows: int,
    run: Callable[..., object],
    inputs: Sequence[tuple[Any, ...]],
) -> dict[Algorithm, float]:
    times = _times(run, inputs, [*guessed, *offer.with_every_tile(replace(like, cluster=CLUSTERS[0]))])
    best = _best(times, LOOKED_AT)
    clustered = [replace(one, cluster=cluster) for one in best for cluster in CLUSTERS]
    times |= _times(run, inputs, [one for one in clustered if one not in times and offer.has(one)])
    if rows <= MAX_SPLIT_ROWS:
        parted = [split(one, count) for one in _best(times, LOOKED_AT // 2) for count in SPLITS]
        times |= _times(run, inputs, [one for one in parted if one not in times and offer.has(one)])
    return times


def _best(times: dict[Algorithm, float], most: int) -> list[Algorithm]:
    return sorted(times, key=lambda algorithm: times[algorithm])[:most]


def _times(
    run: Callable[..., object], inputs: Sequence[tuple[Any, ...]], algorithms: Sequence[Algorithm]
) -> dict[Algorithm, float]:
    """Milliseconds of a few calls on inputs that are not in the cache, once each: noisy, and quick."""
    times: dict[Algorithm, float] = {}
    for first in range(0, len(algorithms), BATCH):
        pending = []
        for algorithm in dict.fromkeys(algorithms[first : first + BATCH]):
            graph, (start, end) = torch.cuda.CUDAGraph(), (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                run(*inputs[0], tuning=algorithm)
                with torch.cuda.graph(graph):
                    for arguments in inputs[:COLD_CALLS]:
                        run(*arguments, tuning=algorithm)
            except Refused:
                continue
            start.record()
            graph.replay()
            end.record()
            pending.append((algorithm, graph, start, end))
        torch.cuda.synchronize()
        times |= {algorithm: start.elapsed_time(end) for algorithm, _, start, end in pending}
    return times
