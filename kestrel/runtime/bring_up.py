"""From a model in memory to one that a scheduler can run: the story of a start, whatever the family.

What the device can do and the configuration asks for decides the operations and number formats (`FastPath`). Then, in
this order: slots of adapters, matrices as the path wants them, a measurement of what steps need, the sizes of batches,
pages for what memory is left, graphs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from kestrel.adapters import AdapterShape
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.models.contract import DecoderModel, DecoderShape, KvScale
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode import DecodeGraphs
from kestrel.runtime.device import on_device
from kestrel.runtime.executor import Executor, FastSteps, MakeFastSteps
from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.memory import (
    MemoryPlan,
    WorkingMemory,
    free_memory_bytes,
    measure_working_memory,
    picture_bytes,
    plan_pages,
)
from kestrel.runtime.pictures import VisionGraphs
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable, sampling_bytes

NO_SCALES: Mapping[int, KvScale] = MappingProxyType({})
LEAST_FOR_TRITON = (8, 0)
LEAST_FOR_FP8 = (8, 9)
CROPS_ON_GPU, CROPS_ON_CPU = 72, 16
CROPS_OF_A_PICTURE = 13
"""The most that a picture of usual shape comes in; narrow ones come in more."""
MOST_ROWS_AHEAD = 8
"""With more rows some are in prefill nearly always: pictures ahead gave 16 rows nothing (the log, 2026-11-19)."""
SHARE_OF_STEPS = 0.2
"""Of the free memory, for as many crops as that holds."""
logger = logging.getLogger("kestrel.runtime")


class ModelRuntime(Executor):
    """One model on one device, ready for a scheduler."""

    def __init__(
        self,
        decoder: DecoderModel,
        config: RuntimeConfig,
        with_adapters: bool = False,
        kv_scales: Mapping[int, KvScale] = NO_SCALES,
    ) -> None:
        """`kv_scales`: those of the checkpoint, by layer."""
        self.decoder = decoder
        if config.tensor_parallel_size != decoder.ranks.size:
            raise ConfigError("tensor_parallel_size", "this runs a model in one process; leave it out")
        device, abilities = decoder.device, Abilities.of(decoder.device)
        path = choose_fast_path(config, abilities, decoder.dtype)
        ops = path.make_ops(abilities)
        if path.note is not None:
            logger.log(logging.WARNING if device.type == "cuda" else logging.INFO, "%s", path.note)
        # Slots, matrices and buffers first: the KV cache is planned from what they leave.
        slots = _adapter_slots(decoder, config) if with_adapters else None
        put_on_path(decoder, path, ops)
        is_captured = path.is_fused and config.enable_cuda_graphs
        working = measured_steps(decoder, config, path, is_captured) if device.type == "cuda" else None
        num_crops = decoder.ranks.least(batch_crops(config, device, working))
        working_bytes = 0 if working is None else working.planned(num_crops)
        # Apart from the other graphs, since pictures are encoded beside the rest of a step.
        vision_graphs = (
            VisionGraphs(decoder.vision, num_crops, GraphPool(device), decoder.ranks.is_alone)
            if is_captured and decoder.vision is not None
            else None
        )
        limits = runtime_limits(
            decoder.shape, device, config, path.kv_dtype, 0 if slots is None else slots.num_slots, working_bytes
        )
        limits = replace(limits, num_pages=decoder.ranks.least(limits.num_pages))
        graphs: MakeFastSteps | None = None
        if is_captured:
            graphs = captured_steps(limits, ops, GraphPool(device, is_urgent=True), slots)
        scales = cache_scales(kv_scales, path.kv_dtype, decoder.shape.num_layers)
        super().__init__(
            decoder, limits, slots, num_crops, graphs, vision_graphs, ops, path.is_fused, path.kv_dtype, scales
        )
        self.prepare()
        pictures = 0 if decoder.vision is None else picture_bytes(config, device, decoder.dtype)
        self.memory_plan = MemoryPlan.of(decoder.shape, limits, path.kv_dtype, device, working_bytes, pictures)
        logger.info("%s", self.memory_plan)
        self.memory_plan.warn_if_short()

    @property
    def adapter_shape(self) -> AdapterShape:
        """What an adapter must fit."""
        return self.decoder.adapter_shape


def _adapter_slots(decoder: DecoderModel, config: RuntimeConfig) -> AdapterSlots:
    shape, max_rank = decoder.adapter_shape, config.max_adapter_rank
    return AdapterSlots(shape, config.max_adapters, max_rank, decoder.device, decoder.dtype, decoder.adapter_parts)


def put_on_path(decoder: DecoderModel, path: FastPath, ops: Ops) -> None:
    if path.is_fused:
        decoder.fuse(ops)
    decoder.quantise(path.quantization)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)  # other streams will read the new matrices
        torch.cuda.empty_cache()  # what matrices left behind counts as free when the KV cache is planned


def measured_steps(decoder: DecoderModel, config: RuntimeConfig, path: FastPath, is_captured: bool) -> WorkingMemory:
    budget = prefill_budget(config, decoder.shape, decoder.device)
    with on_device(decoder.device):
        working = measure_working_memory(decoder, budget, path.kv_dtype, is_captured, path.is_fused)
        torch.cuda.empty_cache()  # what the measurement took counts as free again
    return replace(
        working,
        sampling=sampling_bytes(config.max_batch_size + 1, decoder.shape.vocab_size),
        kept_pictures=pictures_ahead(config, decoder.shape, decoder.device) * embedding_bytes(decoder),
    )


def embedding_bytes(decoder: DecoderModel) -> int:
    """Of one picture."""
    return decoder.shape.num_image_positions * decoder.shape.hidden_dim * decoder.dtype.itemsize


def cache_scales(found: Mapping[int, KvScale], kv_dtype: torch.dtype, num_layers: int) -> list[tuple[float, float]]:
    """Scales of every layer for a float8 cache; none for another cache, or when the checkpoint has none."""
    if not found or kv_dtype.itemsize > 1:
        return []
    missing = [layer for layer in range(num_layers) if layer not in found]
    if missing:
        raise ConfigError(
            "kv_cache_dtype",
            f"'fp8' needs the scales of all layers or of none, and the checkpoint lacks those of {missing}; use auto",
        )
    return [(found[layer].k, found[layer].v) for layer in range(num_layers)]


def captured_steps(
    limits: RuntimeLimits, ops: Ops, pool: GraphPool, adapters: AdapterSlots | None = None
) -> MakeFastSteps:
    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        sizes = batch_sizes(limits.max_batch_size, model.filled_up)
        decode = DecodeGraphs(model, kv, table, ops, sizes, pool, adapters)
        return FastSteps(decode, PrefillGraphs(model, kv, table, ops, limits.max_prefill_tokens, pool, adapters))

    return make


def start_ahead(device: torch.device) -> None:
    """What a start would wait for later, in a thread beside the loading of weights: both leave Python's lock alone."""
    if device.type == "cuda":
        threading.Thread(target=_touch, args=(device,), name="kestrel-start", daemon=True).start()


def _touch(device: torch.device) -> None:
    """Makes the GPU's context, and the hash of Triton's own files that its first kernel needs (0.4 s)."""
    with suppress(Exception):  # whatever it is, the start comes upon it again
        torch.empty(1, device=device)
        from triton.runtime.cache import triton_key  # noqa: PLC0415 - as below

        triton_key()


# ---------------------------------------------------------------------- operations and number formats


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a device can do, as far as the choice depends on it."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability of a GPU; None on a CPU."""
    triton_fault: str | None = None
    """Why Triton cannot be imported; None when it can."""

    @classmethod
    def of(cls, device: torch.device) -> Abilities:
        if device.type != "cuda":
            return cls("the CPU", None)
        capability = torch.cuda.get_device_capability(device)
        return cls(torch.cuda.get_device_name(device), capability, _triton_fault())

    def why_no_triton(self) -> str | None:
        """None when the Triton kernels run here."""
        if self.capability is None:
            return "they need an NVIDIA GPU, and the model runs on the CPU"
        if self.capability < LEAST_FOR_TRITON:
            return f"they need compute capability 8.0, and {self.name} has {_dotted(self.capability)}"
        return None if self.triton_fault is None else f"Triton cannot be imported ({self.triton_fault})"

    def why_no_fp8(self) -> str | None:
        """None when float8 can be computed with here."""
        if self.capability is None:
            return "float8 needs an NVIDIA GPU, and the model runs on the CPU"
        if self.capability < LEAST_FOR_FP8:
            return f"float8 needs compute capability 8.9, and {self.name} has {_dotted(self.capability)}"
        return None


@dataclass(frozen=True, slots=True)
class FastPath:
    is_fused: bool
    """In few, wide operations of Triton kernels; otherwise by the model's modules and torch's own attention."""
    quantization: str
    kv_dtype: torch.dtype
    note: str | None = None
    """Why a faster way was not taken; for the log."""

    def make_ops(self, abilities: Abilities) -> Ops:
        """For the device that the path was chosen for, with the block sizes measured on its kind."""
        if not self.is_fused or abilities.capability is None:
            return PLAIN
        return tuned_triton_ops(abilities.name, abilities.capability)


def choose_fast_path(config: RuntimeConfig, abilities: Abilities, dtype: torch.dtype) -> FastPath:
    """Refuses what was asked for and cannot be had; leaves out only what was left to it."""
    fault, backend = abilities.why_no_triton(), config.attention_backend
    if backend == "triton" and fault is not None:
        raise ConfigError("attention_backend", f"the Triton kernels cannot run: {fault}; use auto or sdpa")
    is_fused = backend != "sdpa" and fault is None
    note = None
    if backend == "auto" and fault is not None:
        note = f"attention runs without the Triton kernels (sdpa): {fault}"
    no_fp8 = abilities.why_no_fp8() or (None if is_fused else _why_not_fused(backend, fault))
    if config.quantization != "none":
        _check_quantization(config, no_fp8, dtype)
    if config.kv_cache_dtype_name == "fp8" and no_fp8 is not None:
        raise ConfigError("kv_cache_dtype", f"'fp8' cannot be used: {no_fp8}; use auto")
    return FastPath(is_fused, config.quantization, _kv_dtype(config, dtype), note)


def _check_quantization(config: RuntimeConfig, no_fp8: str | None, dtype: torch.dtype) -> None:
    wanted = repr(config.quantization)
    if no_fp8 is not None:
        raise ConfigError("quantization", f"{wanted} cannot be used: {no_fp8}; use none")
    if config.quantization == "fp8" and dtype != torch.bfloat16:
        raise ConfigError("quantization", f"{wanted} needs dtype bfloat16 (it is {str(dtype).removeprefix('torch.')})")


def _why_not_fused(backend: str, fault: str | None) -> str:
    if backend == "sdpa":
        return "float8 needs the Triton kernels, which attention_backend='sdpa' forbids"
    return f"float8 needs the Triton kernels, which cannot run: {fault}"


def _kv_dtype(config: RuntimeConfig, dtype: torch.dtype) -> torch.dtype:
    return {"auto": dtype, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype_name]


def triton_ops() -> Ops:
    # Here and not above: Triton comes with CUDA builds of torch only.
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415

    return TRITON


def tuned_triton_ops(gpu: str, capability: tuple[int, int]) -> Ops:
    from kestrel.kernels.triton import ops  # noqa: PLC0415 - as above
    from kestrel.kernels.triton.linear import max_gated_rows, max_small_fp8_rows  # noqa: PLC0415
    from kestrel.kernels.triton.paged_attention import fastest_attend_chunks  # noqa: PLC0415
    from kestrel.kernels.triton.vision import fastest_attend_crops  # noqa: PLC0415
    from kestrel.kernels.tuning import load_table  # noqa: PLC0415

    fastest = fastest_attend_crops(capability), fastest_attend_chunks(capability)
    most_rows = max_gated_rows(capability), max_small_fp8_rows(capability)
    return ops.triton_ops(load_table(gpu, capability), *fastest, *most_rows)


def _triton_fault() -> str | None:
    try:
        triton_ops()
    except ImportError as error:
        return str(error)
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# ---------------------------------------------------------------------- sizes that the configuration leaves open


def batch_sizes(largest: int, filled_up: Callable[[int], int]) -> list[int]:
    """1, 2, 4, 8, then every eighth up to 64, then doubling; the largest is one of them. `filled_up`: to how many rows
    a model fills up so many."""
    usual = [1, 2, 4, 8, *range(16, 65, 8), *(2**power for power in range(7, 13))]
    sizes = [*(size for size in usual if size < largest), largest]
    return sorted({*map(filled_up, sizes)})


def prefill_budget(config: RuntimeConfig, shape: DecoderShape, device: torch.device) -> int:
    """Whoever asks for many rows wants throughput: more prompts in a step share the reading of the weights, and eight
    pictures are encoded faster together than five.

    No more than all rows can hold.
    """
    budget = config.max_prefill_tokens
    if budget is None:
        reads_pictures = shape.num_image_positions > 0
        budget = 2048
        if device.type == "cuda" and config.max_batch_size >= 16:
            budget = 6144 if reads_pictures and config.max_batch_size >= 64 else 4096
    return min(budget, config.max_batch_size * (config.max_seq_length or shape.max_context))


def streaming_budget(config: RuntimeConfig, device: torch.device) -> int:
    """On a GPU a picture's positions, which have to be computed together, with a question."""
    if config.streaming_prefill_tokens is not None:
        return config.streaming_prefill_tokens
    return 768 if device.type == "cuda" else 256


def batch_crops(config: RuntimeConfig, device: torch.device, working: WorkingMemory | None) -> int:
    """Crops encoded together: a GPU is the faster the more there are, a CPU only needs more memory."""
    if config.vision_batch_crops is not None:
        return config.vision_batch_crops
    if working is None:
        return CROPS_ON_CPU
    affordable = working.affordable_crops(int(SHARE_OF_STEPS * free_memory_bytes(device)))
    return min(CROPS_ON_GPU, max(CROPS_OF_A_PICTURE, affordable))


def runtime_limits(
    shape: DecoderShape,
    device: torch.device,
    config: RuntimeConfig,
    kv_dtype: torch.dtype,
    num_adapter_slots: int = 0,
    working_bytes: int = 0,
) -> RuntimeLimits:
    max_seq_length = config.max_seq_length or shape.max_context
    if max_seq_length > shape.max_context:
        raise ConfigError(
            "max_seq_length", f"{max_seq_length} exceeds the model's context of {shape.max_context}; lower it"
        )
    return RuntimeLimits(
        max_batch_size=config.max_batch_size,
        max_seq_length=max_seq_length,
        num_pages=plan_pages(config, shape, device, kv_dtype, working_bytes),
        page_size=config.page_size,
        max_prefill_tokens=prefill_budget(config, shape, device),
        steps_in_flight=1 if device.type == "cuda" else 0,
        num_adapter_slots=num_adapter_slots,
        streaming_prefill_tokens=streaming_budget(config, device),
        paces_pictures=device.type != "cuda",
        pictures_ahead=pictures_ahead(config, shape, device),
    )


def pictures_ahead(config: RuntimeConfig, shape: DecoderShape, device: torch.device) -> int:
    """As many as can get rows next. Of several ranks each would have to be done with one at the same step."""
    is_worth_it = device.type == "cuda" and shape.num_image_positions > 0 and config.max_batch_size <= MOST_ROWS_AHEAD
    return config.max_batch_size if is_worth_it and config.tensor_parallel_size == 1 else 0
