"""The golden models behind the real scheduler and executor."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kestrel.cache import CacheManager
from kestrel.grammar import Grammar
from kestrel.images.picture import RgbImage
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.models.contract import DecoderModel
from kestrel.moondream.decoder import MoondreamDecoder, MoondreamVision
from kestrel.moondream.model import MoondreamModel
from kestrel.request import AdapterUse, GenerationRequest, PromptOutputs, StreamUpdate
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode import FixedDecode
from kestrel.runtime.executor import Executor, FastSteps, MakeFastSteps
from kestrel.runtime.pictures import PictureEncoder
from kestrel.runtime.rows import RowTable
from kestrel.scheduler import GenerationScheduler
from kestrel.settings import SamplingParams
from kestrel.tokens import ContextItem, Token
from tests.moondream.seen_crops import encoded_once
from tests.scheduler.harness import Recorder, run, tokens_of


def noted_pictures_ahead(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of pictures of requests without a row, as they are encoded."""
    ahead: list[str] = []
    encode = PictureEncoder.encode_alone

    def noted(encoder: PictureEncoder, image: Any) -> Tensor:
        ahead.append(image.digest)
        return encode(encoder, image)

    monkeypatch.setattr(PictureEncoder, "encode_alone", noted)
    return ahead


class RememberingVision(MoondreamVision):
    """Encodes each crop once for all tests. `original`: whose weights the model has."""

    def __init__(self, model: MoondreamModel, original: MoondreamModel) -> None:
        super().__init__(model)
        self._original = original
        self.way: Hashable = "plain"

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        encode = super().encode_crops
        if patches[0].is_cuda:
            return encode(patches)
        crops_NPC = torch.cat(list(patches))
        return encoded_once(self._original.vision, crops_NPC, lambda unseen: encode([unseen]), self.way)


class RecordingDecoder(MoondreamDecoder):
    """Keeps the raw logits of every sampling step. `original`: whose weights the model has, if it is a copy."""

    def __init__(self, model: MoondreamModel, original: MoondreamModel | None = None) -> None:
        self._remembering = RememberingVision(model, original or model)
        super().__init__(model, self._remembering)
        self.logits_seen: list[Tensor] = []

    def fuse(self, ops: Ops) -> None:
        super().fuse(ops)
        self._remembering.way = ("fused", ops)

    def quantise(self, quantization: str) -> None:
        super().quantise(quantization)
        self._remembering.way = (quantization, self._remembering.way)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits = super().logits(hidden_ND)
        self.logits_seen.append(logits.clone())
        return logits


@dataclass
class Case:
    """What to generate. `images` maps a digest to pixels."""

    name: str
    items: Sequence[ContextItem]
    grammar: Grammar
    max_new_tokens: int
    images: dict[str, np.ndarray] = field(default_factory=dict)
    sampling: SamplingParams | None = None
    prompt_outputs: PromptOutputs | None = None
    adapter: AdapterUse | None = None
    is_streaming: bool = False

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            request_id=self.name,
            items=tuple(self.items),
            grammar=self.grammar,
            sampling=self.sampling or SamplingParams(max_new_tokens=self.max_new_tokens),
            consumer=Recorder(),
            images={digest: RgbImage(pixels, digest) for digest, pixels in self.images.items()},
            prompt_outputs=self.prompt_outputs,
            adapter=self.adapter,
            is_streaming=self.is_streaming,
        )


@dataclass
class Paged:
    scheduler: GenerationScheduler
    decoder: RecordingDecoder

    def run(self, *cases: Case) -> dict[str, list[Token]]:
        return {name: tokens_of(update) for name, update in self.finish(*cases).items()}

    def finish(self, *cases: Case) -> dict[str, StreamUpdate]:
        for case in cases:
            self.scheduler.add(case.request())
        return run(self.scheduler)


def fixed_decode(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
    return FastSteps(FixedDecode(model, kv, table, PLAIN, (1, 3, 8, 16)))


def usual_limits(max_context: int, **changes: int) -> RuntimeLimits:
    page_size = changes.get("page_size", 16)
    numbers = {
        "max_batch_size": 16,
        "max_seq_length": max_context,
        "num_pages": -(-16 * 900 // page_size),
        "page_size": page_size,
        "max_prefill_tokens": 2048,
        "steps_in_flight": 0,
    }
    return RuntimeLimits(**(numbers | changes))


def paged_in_steps(decoder: RecordingDecoder, make_fast_steps: MakeFastSteps, vision_batch_crops: int = 1) -> Paged:
    """Whose decoding rows run in the steps that are made."""
    limits = usual_limits(decoder.shape.max_context)
    with torch.inference_mode():
        runtime = Executor(decoder, limits, None, vision_batch_crops, make_fast_steps)
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, limits.page_size, True)), decoder)


def paged(
    model: MoondreamModel,
    *,
    prefix_cache: bool = True,
    in_fixed_sizes: bool = False,
    is_fused: bool = False,
    quantization: str | None = None,
    kv_dtype: torch.dtype | None = None,
    kv_scales: Sequence[tuple[float, float]] = (),
    ops: Ops = PLAIN,
    **changes: int,
) -> Paged:
    """`in_fixed_sizes`: decoding rows run as they do inside a captured graph; `is_fused`: in few, wide operations;
    `quantization`: in such operations on quantised weights.
    """
    limits = usual_limits(model.config.text.max_context, **changes)
    decoder = RecordingDecoder(copy.deepcopy(model) if is_fused or quantization else model, original=model)
    by_kernels = is_fused or quantization is not None
    if by_kernels:
        decoder.fuse(ops)
        decoder.quantise(quantization or "none")
    with torch.inference_mode():
        make_fast_steps = fixed_decode if in_fixed_sizes else None
        runtime = Executor(
            decoder, limits, make_fast_steps=make_fast_steps, ops=ops, by_kernels=by_kernels, kv_dtype=kv_dtype,
            kv_scales=kv_scales,
        )  # fmt: skip
    cache = CacheManager(limits.num_pages, limits.page_size, prefix_cache)
    return Paged(GenerationScheduler(runtime, cache), decoder)
