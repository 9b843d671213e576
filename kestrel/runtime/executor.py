"""Runs step plans on one device: the torch runtime.

A plan becomes tensors: which positions run, where their keys go, who reads what. Positions lie flat, prefill chunks
first, then one per decoding row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN, Ops
from kestrel.kernels.row_tables import COORD, SIZE
from kestrel.models.contract import DecoderModel, RegionPart
from kestrel.runtime.adapter_slots import NO_SLOT, AdapterSlots, SlotAdapt
from kestrel.runtime.attention import FlatAttention, PagedKVCache, in_packed_order
from kestrel.runtime.contract import (
    POSITIONS_PER_CROP,
    AdapterLoad,
    DecodeRow,
    PrefillChunk,
    RuntimeLimits,
    StepOutput,
    StepPlan,
)
from kestrel.runtime.decode import FixedDecode, parts_for
from kestrel.runtime.device import (
    MadeBeside,
    SideStream,
    computing,
    end_of_work,
    few_rows,
    look_for_garbage_less,
    on_device,
    shorten_turns,
    upload,
    upload_tensor,
)
from kestrel.runtime.pictures import PictureEncoder, PicturesToCome, VisionGraphs, pictures_of
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import GrammarTables, RowTable
from kestrel.runtime.sampler import (
    PromptTensors,
    Sampled,
    SampledPart,
    read_part,
    read_prompts,
    sample_rows,
    score_prompts,
    send_part,
)
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken, ids_if_text


class StepBatch:
    """The tensors of one step, and its attention (`attend` is handed to the model). `prefill` is in packed order."""

    def __init__(
        self,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        prefill: list[PrefillChunk],
        decode: list[DecodeRow],
        by_kernels: bool,
    ) -> None:
        self._kv, self._table, self._ops, self._by_kernels = kv, table, ops, by_kernels
        self.prefill = prefill
        self.decode = decode
        self.wanted: list[int] = []
        """Positions that a token follows, one for each of `sample_rows`; without any, the first position."""
        self.sample_rows: list[int] = []
        self.rows, self.positions = self._lay_out(prefill, decode)
        self.wanted = self.wanted or [0]

    @property
    def wants_all(self) -> bool:
        return any(chunk.prompt_outputs is not None for chunk in self.prefill)

    @cached_property
    def wanted_B(self) -> Tensor:
        return upload(self.wanted, self._table.device, torch.int64)

    @cached_property
    def positions_T(self) -> Tensor:
        return upload_tensor(self.positions, self._table.device)

    @cached_property
    def attend(self) -> FlatAttention:
        rows_T = upload_tensor(self.rows, self._table.device)
        return FlatAttention(
            self._kv, self._table, self._ops, self.prefill, self.decode, rows_T, self.positions_T, self._by_kernels
        )

    def _lay_out(self, prefill: list[PrefillChunk], decode: list[DecodeRow]) -> tuple[Tensor, Tensor]:
        """On the host. Piece by piece: lists of thousands of integers take a millisecond to become tensors."""
        rows = [torch.full((chunk.num_positions,), chunk.row) for chunk in prefill]
        positions = [torch.arange(chunk.start, chunk.start + chunk.num_positions) for chunk in prefill]
        num_positions = 0
        for chunk in prefill:
            num_positions += chunk.num_positions
            if chunk.samples:
                self.wanted.append(num_positions - 1)
                self.sample_rows.append(chunk.row)
        if decode:
            decoded = [one.row for one in decode]
            rows.append(torch.tensor(decoded))
            positions.append(torch.tensor([one.position for one in decode]))
            self.wanted += range(num_positions, num_positions + len(decode))
            self.sample_rows += decoded
        return torch.cat(rows), torch.cat(positions)


def embed_prefill(model: DecoderModel, chunks: list[PrefillChunk], images: dict[str, Tensor]) -> list[Tensor]:
    """Embeddings of all positions in parts; `images` holds the picture embeddings by digest. Chunks of text that follow
    each other are one part: every operation costs a turn of the GIL, which other threads want too."""
    device = model.device
    embedded: list[Tensor] = []
    ids: list[int] = []

    def flush_text() -> None:
        if ids:
            embedded.append(model.embed_text(upload(ids, device)))
            ids.clear()

    for chunk in chunks:
        first, text = chunk.items[0], ids_if_text(chunk.items)
        if text is not None:
            ids += text
            continue
        flush_text()
        if isinstance(first, ImageSpan):
            bos = [] if first.bos_id is None else [model.embed_text(upload([first.bos_id], device))]
            embedded += [*bos, images[first.digest]]
        else:
            assert model.regions is not None
            mixed = [item.id if isinstance(item, TextToken) else 0 for item in chunk.items]
            embedded.append(_with_region_values(model.regions, chunk, model.embed_text(upload(mixed, device))))
    flush_text()
    return embedded


def _with_region_values(regions: RegionPart, chunk: PrefillChunk, x_TD: Tensor) -> Tensor:
    coords = [(i, item.value) for i, item in enumerate(chunk.items) if isinstance(item, CoordToken)]
    sizes = [(i, (item.width, item.height)) for i, item in enumerate(chunk.items) if isinstance(item, SizeToken)]
    for values, embed in ((coords, regions.embed_coords), (sizes, regions.embed_sizes)):
        if values:
            index = upload([i for i, _ in values], x_TD.device)
            value = upload([v for _, v in values], x_TD.device, torch.float32)
            x_TD = x_TD.index_copy(0, index, embed(value).to(x_TD.dtype))
    return x_TD


def embed_decode(model: DecoderModel, table: RowTable, decode: list[DecodeRow]) -> Tensor:
    """Embeddings of the rows' last tokens, which only the device knows."""
    t = table.tensors
    rows_B = upload([one.row for one in decode], table.device)
    x_BD = model.embed_text(t.last_id[rows_B])
    if model.regions is not None and any(table.host[one.row].carries for one in decode):
        kind_B1, value_B2 = t.last_kind[rows_B][:, None], t.last_value[rows_B]
        x_BD = torch.where(kind_B1 == COORD, model.regions.embed_coords(value_B2[:, 0]).to(x_BD.dtype), x_BD)
        x_BD = torch.where(kind_B1 == SIZE, model.regions.embed_sizes(value_B2).to(x_BD.dtype), x_BD)
    return x_BD


# ---------------------------------------------------------------------- the runtime


@dataclass(slots=True)
class TorchStep:
    """A launched step."""

    step_id: int
    parts: list[SampledPart]
    failures: dict[int, Exception]
    prompts: PromptTensors | None = None
    end: torch.cuda.Event | None = None
    """To be waited for before anything is told."""


@dataclass(frozen=True, slots=True)
class FastSteps:
    """Ways around the usual step that serve most requests: decoding in fixed sizes, captured prefill."""

    decode: FixedDecode
    prefill: PrefillGraphs | None = None


MakeFastSteps: TypeAlias = Callable[[DecoderModel, PagedKVCache, RowTable], FastSteps]


class Executor:
    """The torch runtime behind `kestrel.runtime.contract.Runtime`."""

    def __init__(
        self,
        model: DecoderModel,
        limits: RuntimeLimits,
        adapters: AdapterSlots | None = None,
        vision_batch_crops: int = 16,
        make_fast_steps: MakeFastSteps | None = None,
        vision_graphs: VisionGraphs | None = None,
        ops: Ops = PLAIN,
        by_kernels: bool = False,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Without `make_fast_steps` decoding rows run in one batch with what is prefilled. `by_kernels`: attention of
        such batches is that of the bundle, and not torch's own. Without `kv_dtype` keys and
        values are kept in the model's dtype; `kv_scales` are those of a float8 cache by layer.
        """
        assert (0 if adapters is None else adapters.num_slots) == limits.num_adapter_slots
        self._model = model
        self._ops, self._by_kernels = ops, by_kernels
        self._adapters = adapters
        self._vision_graphs = vision_graphs
        vision = model.vision
        self._pictures = None if vision is None else PictureEncoder(vision, vision_batch_crops, vision_graphs)
        self._limits = limits
        device = model.device
        self._beside = SideStream(device)
        self._to_come = (
            PicturesToCome(self._pictures, self._beside)
            if self._pictures is not None and limits.pictures_ahead
            else None
        )
        self._kv = PagedKVCache(
            model.shape, limits.num_pages, limits.page_size, kv_dtype or model.dtype, device, kv_scales
        )
        self._table = RowTable(
            num_rows=limits.max_batch_size,
            max_pages_per_row=-(-limits.max_positions // limits.page_size),
            spare_page=self._kv.spare_page,
            vocab_size=model.shape.vocab_size,
            grammars=GrammarTables(model.shape.vocab_size, device),
            device=device,
        )
        self._fast = None if make_fast_steps is None else make_fast_steps(model, self._kv, self._table)
        if device.type == "cuda":
            shorten_turns()
            look_for_garbage_less()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Does what the first requests would otherwise wait for. What takes the most memory first: the rest finds room
        in it."""
        device = self._model.device
        with on_device(device), computing(device, self._model.dtype):
            if self._fast is not None:
                if self._fast.prefill is not None:
                    self._fast.prefill.prepare()
                self._fast.decode.prepare()
            if self._vision_graphs is not None:
                self._vision_graphs.prepare(self._limits.streaming_prefill_tokens // POSITIONS_PER_CROP)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # trying out has left memory that only the captures' streams could use

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    @property
    def kv_cache(self) -> PagedKVCache:
        """The stored keys and values, for inspection."""
        return self._kv

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> TorchStep:
        with computing(self._model.device, self._model.dtype):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> TorchStep:
        # First, so that the GPU has work while the host goes through the rest.
        images, failures = self._encode_pictures(plan.prefill)
        self._load_adapters(plan.adapter_loads)
        self._table.apply_starts(plan.starts)
        self._table.wishes.set_masks(plan.masks)
        self._table.apply_page_writes(plan.page_writes)
        self._kv.copy_pages(plan.page_copies)
        parts: list[SampledPart] = []
        decode = plan.decode
        if self._fast is not None and decode:
            rows = [one.row for one in decode]
            wishes = parts_for(self._table, rows)
            if self._fast.decode.serves(wishes):
                parts.append(self._sent(rows, self._fast.decode.run(decode, wishes)))
                decode = []
        self._advance_pictures(plan)
        self._beside.join(images.values())
        prefill = in_packed_order([chunk for chunk in plan.prefill if chunk.row not in failures])
        step = TorchStep(plan.step_id, parts, failures)
        if prefill or decode:
            num_positions = sum(chunk.num_positions for chunk in prefill) + len(decode)
            with few_rows(self._model.device, self._model.dtype, num_positions):
                self._run_flat(step, prefill, decode, {digest: made.tensor for digest, made in images.items()})
        if plan.is_told_whole:
            step.end = end_of_work(self._model.device)
        return step

    def _encode_pictures(self, prefill: list[PrefillChunk]) -> tuple[dict[str, MadeBeside], dict[int, Exception]]:
        if self._pictures is None:
            return {}, {}
        digests = (digest for _, digest in pictures_of(prefill))
        known = {} if self._to_come is None else self._to_come.take(digests)
        missing = [chunk for chunk, digest in pictures_of(prefill) if digest not in known]
        if not missing:
            return known, {}
        with self._beside.running():
            images, failures = self._pictures.encode(missing)
        if not self._model.ranks.is_alone:  # a rank that is short of memory would go on without rows that others run
            for error in failures.values():
                if isinstance(error, torch.OutOfMemoryError):
                    raise error
        return known | dict(zip(images, self._beside.made(images.values()), strict=True)), failures

    def _advance_pictures(self, plan: StepPlan) -> None:
        """Those of later steps, after the rows that decode in fixed sizes, whose tokens people wait for."""
        if self._to_come is not None:
            self._to_come.follow(plan)
        if self._pictures is not None and plan.picture_slices:
            with self._beside.in_turn():
                for slice_ in plan.picture_slices:
                    self._pictures.sliced.advance(slice_)

    def has_encoded(self, digest: str) -> bool:
        is_kept = self._to_come is not None and self._to_come.has_encoded(digest)
        return is_kept or (self._pictures is not None and self._pictures.sliced.has_encoded(digest))

    def _run_flat(
        self,
        step: TorchStep,
        prefill: list[PrefillChunk],
        decode: list[DecodeRow],
        images: dict[str, Tensor],
    ) -> None:
        """Any chunks and rows as one run of positions."""
        batch = StepBatch(self._kv, self._table, self._ops, prefill, decode, self._by_kernels)
        embedded = embed_prefill(self._model, prefill, images)
        if decode:
            embedded.append(embed_decode(self._model, self._table, decode))
        hidden_BD = self._forward(batch, embedded)
        if batch.wants_all:
            step.prompts = score_prompts(self._model, prefill, hidden_BD)
            hidden_BD = hidden_BD[batch.wanted_B]
        if batch.sample_rows:
            sampled = self._sample(hidden_BD, batch.sample_rows)
            step.parts.append(self._sent(batch.sample_rows, sampled))

    def _forward(self, batch: StepBatch, embedded: list[Tensor]) -> Tensor:
        """The residual stream of the wanted positions, or of all."""
        graphs = None if self._fast is None else self._fast.prefill
        is_adapted = any(self._table.host[chunk.row].adapter_slot is not None for chunk in batch.prefill)
        if graphs is None or batch.decode or not graphs.fits(len(batch.positions), is_adapted):
            adapt = self._adapt(batch.rows.tolist())
            wanted_B = None if batch.wants_all else batch.wanted_B
            return self._model.forward(torch.cat(embedded), batch.positions_T, batch.attend, adapt, wanted_B)
        wanted = None if batch.wants_all else batch.wanted
        return graphs.run(embedded, batch.prefill, batch.rows, batch.positions, wanted, is_adapted)

    def _sample(self, hidden_BD: Tensor, rows: list[int]) -> Sampled:
        if self._fast is None:
            return sample_rows(self._model, self._table, hidden_BD, rows)
        return self._fast.decode.sample(hidden_BD, rows, parts_for(self._table, rows))

    def _sent(self, row_indices: list[int], sampled: Sampled) -> SampledPart:
        return send_part(row_indices, [self._table.host[row] for row in row_indices], sampled)

    def collect(self, step: TorchStep) -> StepOutput:
        if step.end is not None:
            step.end.synchronize()
        output = StepOutput(step.step_id, failures=step.failures)
        for part in step.parts:
            read_part(part, output)
        if step.prompts is not None:
            output.prompt_parts, unsound = read_prompts(step.prompts)
            output.failures |= unsound
        return output

    def _load_adapters(self, loads: list[AdapterLoad]) -> None:
        for load in loads:
            assert self._adapters is not None, "the runtime has no adapter slots"
            self._adapters.load(load)

    def _adapt(self, rows: list[int]) -> SlotAdapt | None:
        """The deltas of a step's positions, None when all go through the base model alone."""
        if self._adapters is None:
            return None
        slots = [self._table.host[row].adapter_slot for row in rows]
        if all(slot is None for slot in slots):
            return None
        slot_T = upload([NO_SLOT if slot is None else slot for slot in slots], self._model.device)
        return SlotAdapt(self._adapters, slot_T, self._ops)
