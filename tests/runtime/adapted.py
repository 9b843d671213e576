"""Golden models that serve adapters, and a mixed crowd of requests for them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kestrel.adapters import Adapter
from kestrel.cache import CacheManager
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.layers.attention import Heads
from kestrel.layers.decoder import TextDecoder
from kestrel.moondream.decoder import adapter_shape
from kestrel.request import AdapterUse
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import AdapterLoad, RuntimeLimits
from kestrel.runtime.executor import Executor, MakeFastSteps
from kestrel.scheduler import GenerationScheduler
from kestrel.tokens import Token
from tests.moondream.coarse import coarse
from tests.moondream.goldens import single_adapter
from tests.moondream.naive import NaiveMoondream
from tests.moondream.test_lora import random_adapter
from tests.runtime.paged import Case, Paged, RecordingDecoder
from tests.runtime.test_paged_equality import all_skills, said_by

MAX_RANK = 64


@cache
def adapters(family: str) -> dict[str, Adapter]:
    """Ranks 8 to 64; the second reads the norm for proj, the third has a scale, the fourth changes one matrix only."""
    wide = random_adapter(family, 64, seed=4)
    one_target = next(target for target in wide.targets if target.matrix == "fc1")
    return {
        "narrow": random_adapter(family, 8, seed=1),
        "of norm": replace(random_adapter(family, 16, seed=2), proj_input="block_norm"),
        "scaled": random_adapter(family, 24, seed=3, alpha=12.0),
        "wide": wide,
        "one matrix": replace(wide, targets={one_target: wide.targets[one_target]}),
    }


def crowd(family: str, tag: str) -> list[Case]:
    """Every skill about a picture and one about another, by the base model and by each adapter in turn."""
    uses = [None, *(AdapterUse(name, name, adapter) for name, adapter in adapters(family).items())]
    g = coarse(family)
    cases = all_skills(g, f"{tag}.a", "small") + all_skills(g, f"{tag}.b", "multi")[:1]
    return [replace(case, adapter=uses[number % len(uses)]) for number, case in enumerate(cases)]


def untagged(said: dict[str, list[Token]]) -> dict[str, list[Token]]:
    """What was said, by the case's name without its tag."""
    return {name.partition(".")[2]: tokens for name, tokens in said.items()}


def each_alone(family: str, cases: list[Case]) -> dict[str, list[Token]]:
    """The dense loop of the plain model."""
    return {case.name: said_by(naive_adapted(family, case.adapter and case.adapter.name), case) for case in cases}


@cache
def naive_adapted(family: str, adapter: str | None) -> NaiveMoondream:
    g = coarse(family)
    adapt = None if adapter is None else single_adapter(family, adapters(family)[adapter])
    return NaiveMoondream(g.model, g.config, g.tokenizer, g.naive.image_cache, adapt)


def serving(
    decoder: RecordingDecoder,
    slots: AdapterSlots,
    make: MakeFastSteps | None,
    max_prefill_tokens: int = 2048,
    ops: Ops = PLAIN,
) -> Paged:
    on_gpu = decoder.device.type == "cuda"
    limits = RuntimeLimits(
        max_batch_size=16,
        max_seq_length=decoder.shape.max_context,
        num_pages=1800,
        page_size=16,
        max_prefill_tokens=max_prefill_tokens,
        steps_in_flight=1 if on_gpu else 0,
        num_adapter_slots=slots.num_slots,
    )
    with torch.inference_mode():
        runtime = Executor(decoder, limits, slots, make_fast_steps=make, ops=ops, by_kernels=make is not None)
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, 16, True)), decoder)


def decoder_and_slots(family: str, device: str, num_slots: int) -> tuple[RecordingDecoder, AdapterSlots]:
    decoder = RecordingDecoder(copy.deepcopy(coarse(family).model).to(device))
    shape = adapter_shape(coarse(family).config.text)
    return decoder, AdapterSlots(shape, num_slots, MAX_RANK, decoder.device, decoder.dtype)


def fused_text(ops: Ops, device: str = "cpu", dtype: torch.dtype = torch.float32, family: str = "md2") -> TextDecoder:
    text = copy.deepcopy(coarse(family).model.text).to(device, dtype)
    text.fuse(ops)
    return text


def loaded_slots(device: str = "cpu", dtype: torch.dtype = torch.float32, family: str = "md2") -> AdapterSlots:
    """A slot for each of the adapters, and an empty one."""
    shape = adapter_shape(coarse(family).config.text)
    slots = AdapterSlots(shape, len(adapters(family)) + 1, MAX_RANK, torch.device(device), dtype)
    for slot, adapter in enumerate(adapters(family).values()):
        slots.load(AdapterLoad(slot, str(slot), adapter))
    return slots


class ValuesAlone:
    """Attention of which each position sees its own value only; as kernels have it, or apart."""

    def __init__(self, num_rows: int, device: str = "cpu", family: str = "md2", *, by_kernels: bool = True) -> None:
        self._slots_T = torch.arange(num_rows, device=device)
        text = coarse(family).config.text
        self._cache_shape = (2, 1, num_rows, text.n_kv_heads, text.head_dim)
        self._by_kernels = by_kernels

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        if self._by_kernels:
            k_cache, v_cache = heads.qkv_TF.new_zeros(self._cache_shape).unbind(0)
            q_THD, v_THD = heads.stored(self._slots_T, (k_cache, v_cache), (1.0, 1.0)), v_cache[0]
        else:
            q_THD, _, v_THD = heads.rotated()
        values_TD = v_THD.repeat_interleave(q_THD.shape[1] // v_THD.shape[1], dim=1).flatten(1)
        return values_TD
