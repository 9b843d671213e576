"""What text models need: norms, gates, tau, rotation, attention over pages, linears of few rows, experts, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kestrel.bench.kernels.case import FP8_BYTES, HALF_BYTES, PAGE_SIZE, Case, Maker, Sizes, TextDims, op_case
from kestrel.bench.kernels.tunings import (
    chunk_tunings,
    decode_tunings,
    low_rank_tunings,
    moe_fp8_tunings,
    moe_grouped_tunings,
    moe_small_tunings,
    rotate_tunings,
    small_fp8_linear_tunings,
    small_linear_tunings,
    tau_tunings,
)
from kestrel.bench.kernels.vision_cases import norm_case, row_case
from kestrel.config import RuntimeConfig
from kestrel.kernels.fp8 import rows_to_fp8, weights_to_fp8
from kestrel.kernels.low_rank import SlotFactors, SlotTiles, stored_rank, tile_slots
from kestrel.kernels.moe_mlp import ExpertDeltas, ExpertFactors, moe_mlp, moe_mlp_fp8, route_top_k
from kestrel.kernels.ops import PLAIN
from kestrel.kernels.paged_attention import as_pages
from kestrel.kernels.rotary import rope_tables
from kestrel.kernels.triton.launch import HOPPER
from kestrel.kernels.triton.linear import MAX_ROWS, small_fp8_linear
from kestrel.kernels.triton.low_rank import usual_rows_per_tile
from kestrel.kernels.triton.moe_grouped import moe_grouped, moe_grouped_fp8
from kestrel.kernels.triton.moe_mlp import moe_small
from kestrel.kernels.triton.ops import TRITON
from kestrel.kernels.triton.paged_attention import attend_chunks, attend_chunks_on_hopper
from kestrel.layers.mlp import MAX_EXACT_ROWS

FACTOR_BYTES = 4
NORM_EPS = 1e-5


def text_cases(sizes: Sizes) -> Iterator[Case]:
    text = sizes.text
    for rows in (*sizes.decode_rows, *sizes.prefill_tokens):
        yield norm_case(rows, text.dim, num_deltas=2)
        yield norm_case(rows, text.dim, is_rms=True)
        yield norm_case(rows, text.dim, num_deltas=1, is_rms=True)
        yield row_case("silu_gate", rows, text.ff_dim)
        yield _rotate_case(sizes, rows, has_tau=False)
    for tokens in sizes.tau_tokens:
        yield _tau_case(sizes, tokens)
    for rows in sizes.prefill_tokens:
        yield norm_case(rows, text.dim, to_fp8=True)
        yield norm_case(rows, text.dim, num_deltas=2, to_fp8=True)
        yield norm_case(rows, text.dim, is_rms=True, to_fp8=True)
        yield norm_case(rows, text.dim, num_deltas=1, is_rms=True, to_fp8=True)
        yield row_case("gelu_to_fp8", rows, text.ff_dim)
        yield row_case("silu_gate_to_fp8", rows, text.ff_dim)
    yield _rotate_case(sizes, sizes.prefill_tokens[-1], has_tau=True)
    for rows in sizes.decode_rows:
        yield _decode_case(sizes, rows, None)
        yield _decode_case(sizes, rows, torch.float8_e4m3fn)
    picture, text_behind = _prompt_chunks(sizes)
    for prompts in sizes.prompts:
        yield _chunks_case(sizes, prompts, [picture, text_behind], None)
        yield _chunks_case(sizes, prompts, [picture, text_behind], torch.float8_e4m3fn)
        yield _chunks_case(sizes, prompts, [picture], None)
        yield _chunks_case(sizes, prompts, [text_behind], None)
    for rows in sizes.few_rows:
        for has_fp8 in (False, True):
            yield _linear_case("fc1", rows, text.ff_dim, text.dim, has_gelu=True, has_fp8_weights=has_fp8)
            yield _linear_case("fc2", rows, text.dim, text.ff_dim, has_fp8_weights=has_fp8)
        yield _linear_case("qkv", rows, text.qkv_dim, text.dim)
        yield _linear_case("proj", rows, text.dim, text.dim)
        if rows > 1:
            yield from _fp8_linear_cases(sizes, rows)
        yield _linear_case("head", rows, text.vocab_size, text.dim)
        yield _linear_case("qkv", rows, text.qkv_dim, text.dim, has_norm=True)
        yield _projection_case(sizes, rows)
        yield _gated_case(rows, text.ff_dim, text.dim)


def _caches(maker: Maker, text: TextDims, num_pages: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Of keys and of values, in the order that engines have on the device."""
    k, v = as_pages(maker.numbers(2, num_pages, PAGE_SIZE, text.n_kv_heads, text.head_dim, dtype=dtype))
    return k, v


def _rotate_case(sizes: Sizes, tokens: int, has_tau: bool) -> Case:
    text = sizes.text

    def make(maker: Maker) -> tuple[Any, ...]:
        tables = rope_tables(text.max_context, text.rotary_dim, text.rope_theta, maker.device)
        slots = maker.order(2 * tokens)[:tokens]
        caches = _caches(maker, text, -(-2 * tokens // PAGE_SIZE))
        qkv, positions = maker.numbers(tokens, text.qkv_dim), maker.integers(text.max_context, tokens)
        factors = [maker.numbers(tokens, heads, dtype=torch.float32) for heads in (text.n_heads, text.n_kv_heads)]
        tau = tuple(factors) if has_tau else None
        return qkv, text.n_heads, text.n_kv_heads, *tables, positions, slots, *caches, tau

    return op_case(
        "rotate_and_store",
        f"{tokens} tokens{', tau' * has_tau}",
        make,
        bytes_moved=2 * tokens * text.qkv_dim * HALF_BYTES,
        flop=4 * tokens * text.qkv_dim,
        tunings=rotate_tunings(),
        is_plain_capturable=False,
    )


def _tau_case(sizes: Sizes, tokens: int) -> Case:
    text = sizes.text
    num_out, num_in = 2 * text.n_heads, text.qkv_dim

    def make(maker: Maker) -> tuple[Tensor, ...]:
        w = maker.numbers(num_out, num_in, scale=num_in**-0.5)
        return maker.numbers(tokens, num_in), w, maker.numbers(text.n_heads), maker.integers(text.max_context, tokens)

    return op_case(
        "tau_factors",
        f"{tokens} tokens",
        make,
        bytes_moved=(tokens + num_out) * num_in * HALF_BYTES + tokens * num_out * FACTOR_BYTES,
        flop=2 * tokens * num_out * num_in,
        tunings=tau_tunings(tokens),
    )


def _decode_case(sizes: Sizes, rows: int, cache_dtype: torch.dtype | None) -> Case:
    text, pages = sizes.text, -(-sizes.max_keys // PAGE_SIZE)

    def make(maker: Maker) -> tuple[Any, ...]:
        table = maker.order(rows * pages).view(rows, pages)
        caches = _caches(maker, text, rows * pages, cache_dtype)
        num_keys = torch.full((rows,), sizes.num_keys, device=maker.device)
        return maker.numbers(rows, text.n_heads, text.head_dim), *caches, table, num_keys

    width = HALF_BYTES if cache_dtype is None else cache_dtype.itemsize
    kv_numbers = 2 * rows * sizes.num_keys * text.n_kv_heads * text.head_dim
    return op_case(
        "attend_rows",
        f"{rows} rows of {sizes.num_keys} keys{'' if cache_dtype is None else ', fp8'}",
        make,
        bytes_moved=kv_numbers * width + 2 * rows * text.n_heads * text.head_dim * HALF_BYTES,
        flop=2 * kv_numbers * text.n_heads // text.n_kv_heads,
        tunings=decode_tunings(),
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: int
    count: int
    is_bidirectional: bool

    @property
    def num_pairs(self) -> int:
        """Of a query and a position that it sees."""
        inside = self.count * self.count if self.is_bidirectional else self.count * (self.count + 1) // 2
        return self.count * self.start + inside


def _prompt_chunks(sizes: Sizes) -> tuple[_Chunk, _Chunk]:
    picture, behind = sizes.prompt
    return _Chunk(0, picture, is_bidirectional=True), _Chunk(picture, behind, is_bidirectional=False)


def _chunks_case(sizes: Sizes, prompts: int, chunks: list[_Chunk], cache_dtype: torch.dtype | None) -> Case:
    """All chunks of some prompts in one launch, or only the pictures or the texts of them."""
    text, pages, num_keys = sizes.text, -(-sizes.max_keys // PAGE_SIZE), chunks[-1].start + chunks[-1].count
    num_queries, max_count = prompts * sum(chunk.count for chunk in chunks), max(chunk.count for chunk in chunks)

    def make(maker: Maker) -> tuple[Any, ...]:
        table = maker.order(prompts * pages).view(prompts, pages).repeat_interleave(len(chunks), dim=0)
        caches = _caches(maker, text, prompts * pages, cache_dtype)
        count, start, bidirectional = (
            torch.tensor(numbers * prompts, device=maker.device)
            for numbers in (
                [c.count for c in chunks],
                [c.start for c in chunks],
                [int(c.is_bidirectional) for c in chunks],
            )
        )
        where = count.cumsum(0) - count, count, start, bidirectional
        return maker.numbers(num_queries, text.n_heads, text.head_dim), *caches, table, *where, max_count

    width = HALF_BYTES if cache_dtype is None else cache_dtype.itemsize
    kv_numbers = 2 * prompts * num_keys * text.n_kv_heads * text.head_dim
    counts = " and ".join(f"{c.count} after {c.start}" for c in chunks)
    return Case(
        "attend_chunks",
        f"{prompts} prompts, {counts}{'' if cache_dtype is None else ', fp8'}",
        PLAIN.attend_chunks,
        _attend_chunks,
        make,
        bytes_moved=kv_numbers * width + 2 * num_queries * text.n_heads * text.head_dim * HALF_BYTES,
        flop=4 * prompts * sum(chunk.num_pairs for chunk in chunks) * text.n_heads * text.head_dim,
        tunings=chunk_tunings(max_count),
    )


def _attend_chunks(q_THD: Tensor, *where: Any, **blocks: Any) -> Tensor:
    """What engines run on a Hopper GPU; the portable kernel elsewhere, and where its block sizes are asked for."""
    if blocks or not q_THD.is_cuda or torch.cuda.get_device_capability(q_THD.device)[0] != HOPPER:
        return attend_chunks(q_THD, *where, **blocks)
    return attend_chunks_on_hopper(q_THD, *where)


def _linear_case(
    name: str,
    rows: int,
    num_out: int,
    num_in: int,
    has_gelu: bool = False,
    has_fp8_weights: bool = False,
    has_norm: bool = False,
) -> Case:
    def make(maker: Maker) -> tuple[Any, ...]:
        weight, scale = maker.numbers(num_out, num_in, scale=num_in**-0.5), None
        if has_fp8_weights:
            weight, scale = weights_to_fp8(weight)
        x, bias, residual = maker.numbers(rows, num_in), maker.numbers(num_out), maker.numbers(rows, num_out)
        norm = (maker.numbers(num_in), NORM_EPS) if has_norm else None
        return x, weight, bias, residual, has_gelu, scale, None, norm

    weight_bytes = num_out * num_in * (FP8_BYTES if has_fp8_weights else HALF_BYTES)
    return op_case(
        "small_linear",
        f"{name}, {rows}x{num_in} to {num_out}{', fp8 weights' * has_fp8_weights}{', norm' * has_norm}",
        make,
        bytes_moved=weight_bytes + rows * (num_in + 2 * num_out) * HALF_BYTES,
        flop=2 * rows * num_out * num_in,
        tunings=small_linear_tunings(rows),
    )


def _fp8_linear_cases(sizes: Sizes, rows: int) -> Iterator[Case]:
    dim, qkv_dim, ff_dim = sizes.text.dim, sizes.text.qkv_dim, sizes.text.ff_dim
    matrices = {"qkv": (qkv_dim, dim), "proj": (dim, dim), "fc1": (ff_dim, dim), "fc2": (dim, ff_dim)}
    for name, (num_out, num_in) in matrices.items():
        yield _fp8_linear_case(name, rows, num_out, num_in)


def _fp8_linear_case(name: str, rows: int, num_out: int, num_in: int) -> Case:
    def make(maker: Maker) -> tuple[Any, ...]:
        x, weight = maker.numbers(rows, num_in), maker.numbers(num_out, num_in, scale=num_in**-0.5)
        return *rows_to_fp8(x), *weights_to_fp8(weight), maker.numbers(num_out), maker.dtype

    return Case(
        "small_fp8_linear",
        f"{name}, {rows}x{num_in} to {num_out}",
        PLAIN.fp8_linear,
        small_fp8_linear,
        make,
        bytes_moved=(num_out + rows) * num_in * FP8_BYTES + rows * num_out * HALF_BYTES,
        flop=2 * rows * num_out * num_in,
        tunings=small_fp8_linear_tunings(),
    )


def _projection_case(sizes: Sizes, rows: int) -> Case:
    text = sizes.text

    def make(maker: Maker) -> tuple[Any, ...]:
        weight = maker.numbers(text.qkv_dim, text.dim, scale=text.dim**-0.5)
        tables = rope_tables(text.max_context, text.rotary_dim, text.rope_theta, maker.device)
        slots, positions = maker.order(2 * rows)[:rows], maker.integers(text.max_context, rows)
        caches = _caches(maker, text, -(-2 * rows // PAGE_SIZE))
        heads = text.n_heads, text.n_kv_heads
        return (
            maker.numbers(rows, text.dim), weight, maker.numbers(text.qkv_dim), None, None, *heads, *tables, positions,
            slots, *caches,
        )  # fmt: skip

    return op_case(
        "project_and_store",
        f"{rows} rows",
        make,
        bytes_moved=(text.qkv_dim * text.dim + rows * (text.dim + text.qkv_dim)) * HALF_BYTES,
        flop=2 * rows * text.qkv_dim * text.dim,
        tunings=small_linear_tunings(rows),
        is_plain_capturable=False,
    )


def _gated_case(rows: int, inner_dim: int, num_in: int) -> Case:
    def make(maker: Maker) -> tuple[Any, ...]:
        weight = maker.numbers(2 * inner_dim, num_in, scale=num_in**-0.5)
        return maker.numbers(rows, num_in), weight, None, (maker.numbers(num_in), NORM_EPS)

    return op_case(
        "gated_linear",
        f"{rows}x{num_in} to {inner_dim}, norm",
        make,
        bytes_moved=2 * inner_dim * num_in * HALF_BYTES + rows * (num_in + inner_dim) * HALF_BYTES,
        flop=4 * rows * inner_dim * num_in,
        tunings=small_linear_tunings(rows),
    )


# ---------------------------------------------------------------------- mixtures of experts
# For few tokens and for many, with matrices as they are and in float8.


def moe_cases(sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.few_rows:
        for has_fp8_experts in (False, True):
            yield _moe_case("moe_small", moe_small, sizes, tokens, moe_small_tunings(), has_fp8_experts)
    for tokens in sizes.routed_tokens:
        share = tokens * sizes.moe.experts_per_token / sizes.moe.num_experts
        yield _moe_case("moe_grouped", moe_grouped, sizes, tokens, moe_grouped_tunings(share))
        usual_room = replace(_Slots(*sizes.adapters[0]), max_rank=RuntimeConfig.max_adapter_rank)
        yield _adapted_moe_case(sizes, tokens, usual_room, moe_grouped_tunings(share))
        narrow = moe_fp8_tunings(share)
        if tokens <= MAX_EXACT_ROWS:
            yield _moe_case("moe_grouped", moe_grouped, sizes, tokens, narrow, has_fp8_experts=True)
        else:
            case = _moe_case("moe_grouped_fp8", moe_grouped_fp8, sizes, tokens, narrow, has_fp8_experts=True)
            yield replace(case, plain=moe_mlp_fp8, gives_fp8=True)


def _moe_case(
    op: str,
    run: Callable[..., Tensor],
    sizes: Sizes,
    tokens: int,
    tunings: tuple[Any, ...],
    has_fp8_experts: bool = False,
) -> Case:
    moe, dim = sizes.moe, sizes.text.dim
    num_experts, inner, top_k = moe.num_experts, moe.expert_inner_dim, moe.experts_per_token

    def make(maker: Maker) -> tuple[Tensor, ...]:
        fc1 = maker.numbers(num_experts, 2 * inner, dim, scale=dim**-0.5)
        fc2 = maker.numbers(num_experts, dim, inner, scale=inner**-0.5)
        weights, ids = route_top_k(maker.numbers(tokens, num_experts), top_k)
        x = maker.numbers(tokens, dim)
        if not has_fp8_experts:
            return x, weights, ids, fc1, fc2
        (fc1, fc1_scale), (fc2, fc2_scale) = _narrowed(fc1), _narrowed(fc2)
        return x, weights, ids, fc1, fc2, fc1_scale, fc2_scale

    per_expert = 3 * inner * dim
    # Random routing: an expert is touched unless every token passes it by.
    touched = num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    expert_bytes = touched * per_expert * (FP8_BYTES if has_fp8_experts else HALF_BYTES)
    return Case(
        op=op,
        size=f"{tokens} tokens, {top_k} of {num_experts} experts{', fp8' * has_fp8_experts}",
        plain=moe_mlp,
        triton=run,
        make=make,
        bytes_moved=int(expert_bytes) + 2 * tokens * dim * HALF_BYTES,
        flop=2 * tokens * top_k * per_expert,
        tunings=tunings,
        is_plain_capturable=False,
    )


def _adapted_moe_case(sizes: Sizes, tokens: int, slots: _Slots, tunings: tuple[Any, ...]) -> Case:
    """Every token with an adapter, those of one adapter together as in prompts; each expert holds its share of an
    adapter's rank."""
    moe, dim = sizes.moe, sizes.text.dim
    rank, width = (-(-whole // moe.experts_per_token) for whole in (slots.rank, slots.max_rank))
    base = _moe_case("moe_mlp_adapted", TRITON.moe_mlp_adapted, sizes, tokens, tunings)

    def factors(maker: Maker, num_out: int, num_in: int) -> ExpertFactors:
        a, b = (
            maker.numbers(slots.count, moe.num_experts, *size, scale=size[1] ** -0.5)
            for size in ((width, num_in), (num_out, width))
        )
        ranks = torch.tensor([*[rank] * slots.count, 0], dtype=torch.int32, device=maker.device)
        return ExpertFactors(a, b, ranks)

    def make(maker: Maker) -> tuple[Any, ...]:
        slot_T = torch.arange(tokens, device=maker.device) * slots.count // tokens
        fc1, fc2 = factors(maker, 2 * moe.expert_inner_dim, dim), factors(maker, dim, moe.expert_inner_dim)
        return *base.make(maker), None, None, ExpertDeltas(slot_T, fc1, fc2)

    per_pair = rank * (2 * dim + 3 * moe.expert_inner_dim)
    touched = min(slots.count * moe.num_experts, tokens * moe.experts_per_token)
    return replace(
        base,
        size=f"{base.size}, {slots.count} adapters of rank {slots.rank} in {slots.max_rank}",
        plain=PLAIN.moe_mlp_adapted,
        make=make,
        bytes_moved=base.bytes_moved + touched * per_pair * HALF_BYTES,
        flop=base.flop + 2 * tokens * moe.experts_per_token * per_pair,
    )


def _narrowed(matrices_EFD: Tensor) -> tuple[Tensor, Tensor]:
    """In float8, and a scale for each row of each expert."""
    numbers, scale = weights_to_fp8(matrices_EFD.flatten(0, 1))
    return numbers.view(matrices_EFD.shape), scale.view(matrices_EFD.shape[:2])


# ---------------------------------------------------------------------- adapters
# Deltas of one matrix and at both ends of a parallel block: several small ones mixed, and a single large one.


def low_rank_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.adapted_rows:
        for adapters in sizes.adapters:
            slots = _Slots(*adapters)
            if 1 < rows <= MAX_ROWS:
                yield from _layer_cases(sizes, rows, slots)
            yield _single_case(sizes, rows, slots)
            yield _input_case(sizes, rows, slots)
            yield _output_case(sizes, rows, slots)


@dataclass(frozen=True, slots=True)
class _Slots:
    count: int
    rank: int
    max_rank: int

    def factors(self, maker: Maker, num_out: int, num_in: int) -> SlotFactors:
        width = stored_rank(self.max_rank)
        a = maker.numbers(self.count, width, num_in, scale=num_in**-0.5)
        b = maker.numbers(self.count, width, num_out, scale=width**-0.5)
        ranks = [*[stored_rank(self.rank)] * self.count, 0]
        return SlotFactors(a, b, torch.tensor(ranks, dtype=torch.int32, device=maker.device))

    def tiles(self, maker: Maker, rows: int) -> SlotTiles:
        """Each adapter has as many rows, side by side."""
        slot_T = torch.arange(rows, device=maker.device) * self.count // rows
        return tile_slots(slot_T, self.count, usual_rows_per_tile(rows))

    def size(self, rows: int) -> str:
        room = "" if self.rank == self.max_rank else f" in slots of {self.max_rank}"
        return f"{rows} rows, {self.count} of rank {self.rank}{room}"


def _deltas_case(
    op: str,
    rows: int,
    slots: _Slots,
    make: Callable[[Maker], tuple[Any, ...]],
    changed: tuple[int, ...],
    widths: int,
    other_numbers: int,
    **how: Any,
) -> Case:
    """An operation in place: `changed` are the places of what it adds to among its inputs. `widths`: those of all
    matrices, both sides together; `other_numbers`: of a row, read and written."""

    def run(add: Callable[..., None], *inputs: Any, **tuning: Any) -> tuple[Tensor, ...]:
        add(*inputs, **how, **tuning)
        return tuple(inputs[place] for place in changed)

    factor_numbers = slots.count * slots.rank * widths
    return Case(
        op=op,
        size=slots.size(rows),
        plain=partial(run, getattr(PLAIN, op)),
        triton=partial(run, getattr(TRITON, op)),
        make=make,
        bytes_moved=(factor_numbers + rows * other_numbers) * HALF_BYTES,
        flop=2 * rows * factor_numbers // slots.count,
        tunings=low_rank_tunings(usual_rows_per_tile(rows), slots.max_rank),
        is_plain_capturable=False,
    )


def _single_case(sizes: Sizes, rows: int, slots: _Slots) -> Case:
    num_in, num_out = sizes.text.dim, sizes.text.qkv_dim

    def make(maker: Maker) -> tuple[Any, ...]:
        y, x = maker.numbers(rows, num_out), maker.numbers(rows, num_in)
        return slots.tiles(maker, rows), y, x, slots.factors(maker, num_out, num_in)

    return _deltas_case("add_deltas", rows, slots, make, (1,), num_in + num_out, num_in + 2 * num_out)


def _layer_cases(sizes: Sizes, rows: int, slots: _Slots) -> Iterator[Case]:
    dim, qkv_dim, ff_dim = sizes.text.dim, sizes.text.qkv_dim, sizes.text.ff_dim
    matrices = {"qkv": (qkv_dim, dim), "proj": (dim, dim), "fc1": (ff_dim, dim), "fc2": (dim, ff_dim)}
    for name, size in matrices.items():
        yield _layer_case(name, rows, slots, *size)


def _layer_case(name: str, rows: int, slots: _Slots, num_out: int, num_in: int) -> Case:
    """Every row has an adapter."""

    def make(maker: Maker) -> tuple[Any, ...]:
        weight, x = maker.numbers(num_out, num_in, scale=num_in**-0.5), maker.numbers(rows, num_in)
        other, reads_other = None, None
        if name == "proj":
            other = maker.numbers(rows, num_in)
            reads_other = torch.zeros(slots.count + 1, dtype=torch.int32, device=maker.device)
        is_base = torch.zeros(rows, dtype=torch.bool, device=maker.device) if name == "fc1" else None
        tiles, factors = slots.tiles(maker, rows), slots.factors(maker, num_out, num_in)
        return tiles, x, weight, maker.numbers(num_out), factors, other, reads_other, is_base

    factor_numbers = slots.count * slots.rank * (num_in + num_out)
    return op_case(
        "small_adapted_linear",
        f"{name}, {slots.size(rows)}",
        make,
        bytes_moved=(num_out * num_in + factor_numbers + rows * (num_in + 3 * num_out)) * HALF_BYTES,
        flop=2 * rows * (num_out * num_in + factor_numbers // slots.count),
        tunings=low_rank_tunings(usual_rows_per_tile(rows), slots.max_rank),
        is_plain_capturable=False,
    )


def _input_case(sizes: Sizes, rows: int, slots: _Slots) -> Case:
    dim, qkv_dim, ff_dim = sizes.text.dim, sizes.text.qkv_dim, sizes.text.ff_dim

    def make(maker: Maker) -> tuple[Any, ...]:
        wide = maker.numbers(rows, qkv_dim + ff_dim)
        factors = [slots.factors(maker, num_out, dim) for num_out in (qkv_dim, ff_dim)]
        tiles, y = slots.tiles(maker, rows), maker.numbers(rows, dim)
        return tiles, y, wide[:, :qkv_dim], factors[0], wide[:, qkv_dim:], factors[1]

    widths, moved = 2 * dim + qkv_dim + ff_dim, dim + 2 * (qkv_dim + ff_dim)
    return _deltas_case("add_input_deltas", rows, slots, make, (2, 4), widths, moved)


def _output_case(sizes: Sizes, rows: int, slots: _Slots) -> Case:
    dim, ff_dim = sizes.text.dim, sizes.text.ff_dim

    def make(maker: Maker) -> tuple[Any, ...]:
        joined = maker.numbers(rows, dim + ff_dim)
        total, y = maker.numbers(rows, dim), maker.numbers(rows, dim)
        reads_norm = torch.zeros(slots.count + 1, dtype=torch.int32, device=maker.device)
        proj, fc2 = (slots.factors(maker, dim, num_in) for num_in in (dim, ff_dim))
        return slots.tiles(maker, rows), total, joined[:, :dim], y, reads_norm, proj, joined[:, dim:], fc2

    return _deltas_case("add_output_deltas", rows, slots, make, (1,), 3 * dim + ff_dim, 3 * dim + ff_dim)
