"""A model over several ranks gives the logits of the whole one, and each rank reads its own part only."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kestrel.adapters import Adapter
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.families import find_family, load, resolve
from kestrel.kernels.ops import PLAIN
from kestrel.layers.attention import Heads
from kestrel.layers.decoder import TextDecoder
from kestrel.layers.linear import parts_of
from kestrel.models.checkpoint_files import Checkpoint
from kestrel.models.contract import DecoderModel
from kestrel.parallel.group import RankGroup
from kestrel.parallel.ranks import ALONE, Part, Ranks
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.contract import AdapterLoad
from tests.exhaustive import sweep
from tests.llama.tiny_folders import random_adapter, write_folder
from tests.moondream.coarse import coarse_folder
from tests.parallel.rank_threads import in_ranks

FEW, MANY = 6, 24
"""Positions of a step: as many as go through products for a handful of rows, and more."""
MODELS = ["md2", "md3", "llama", "tied", "biased", "qwen3", "qwen3_moe", "tinyllama"]
"""The last one has one head of keys and values, which all ranks have then."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    golden = {kind: coarse_folder(kind) for kind in ("md2", "md3")}
    return golden | {kind: write_folder(place / kind, kind) for kind in MODELS if kind not in golden}


def decoder(kind: str, folders: dict[str, Path], ranks: Ranks = ALONE, device: str = "cpu") -> DecoderModel:
    located = resolve(RuntimeConfig(model_path=folders[kind]))
    return find_family(located.family).decoder(load(located, device, torch.float32, ranks=ranks))


def causal(layer: int, heads: Heads) -> Tensor:
    """One sequence from its beginning."""
    q, k, v = (x.transpose(0, 1)[None] for x in heads.rotated())
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mixed_TD = out[0].transpose(0, 1).flatten(1)
    return mixed_TD


def logits(model: DecoderModel, num_positions: int, adapt: SlotAdapt | None = None, first_id: int = 0) -> Tensor:
    positions = torch.arange(num_positions, device=model.device)
    ids = (positions * 5 + first_id) % 97
    return model.logits(model.forward(model.embed_text(ids), positions, causal, adapt))


def assert_alike(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for of_rank in found:
        for one, other in zip(of_rank, expected, strict=True):
            assert other.std() > 0.05
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("is_fused", [False, True])
@sweep("kind", MODELS, always=["md2", "md3", "tied", "biased", "qwen3_moe", "tinyllama"])
def test_logits_are_those_of_one_process(kind: str, is_fused: bool, folders: dict[str, Path]) -> None:
    def run(ranks: Ranks) -> list[Tensor]:
        model = decoder(kind, folders, ranks)
        if is_fused:
            model.fuse(PLAIN)
        return [logits(model, FEW), logits(model, MANY)]

    assert_alike(in_ranks(2, run), in_ranks(1, run)[0])


@pytest.mark.parametrize("kind", ["md2", "md3", "llama"])
def test_float8_parts_are_as_near_as_the_whole(kind: str, folders: dict[str, Path]) -> None:
    """Scales are those of rows: a rank's part of a row has one of its own, which is no larger. The mean of several
    prompts, since rounding sends a single one to other experts."""
    prompts = [(num_positions, first_id) for num_positions in (FEW, MANY) for first_id in range(8)]

    def run(ranks: Ranks) -> list[Tensor]:
        model = decoder(kind, folders, ranks)
        exact = [logits(model, count, first_id=first) for count, first in prompts]
        model.fuse(PLAIN)
        model.quantise("fp8")
        found = [logits(model, count, first_id=first) for count, first in prompts]
        errors = torch.stack([(one - other).norm() / other.norm() for one, other in zip(found, exact, strict=True)])
        return list(errors.view(2, -1).mean(dim=1))

    whole = in_ranks(1, run)[0]
    for found in in_ranks(2, run):
        for one, other in zip(found, whole, strict=True):
            assert 0.0 < one <= 1.05 * other


def test_ranks_beyond_the_heads_of_keys_share_them(folders: dict[str, Path]) -> None:
    def run(ranks: Ranks) -> list[Tensor]:
        return [logits(decoder("qwen3_moe", folders, ranks), MANY)]

    assert_alike(in_ranks(4, run), in_ranks(1, run)[0])


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", ["md2", "md3", "llama", "qwen3_moe"])
def test_adapters_are_split_as_their_matrices(kind: str, is_fused: bool, folders: dict[str, Path]) -> None:
    """Two adapters and the base model in one step; one delta of `proj` reads the block's norm where blocks have it."""

    def run(ranks: Ranks) -> list[Tensor]:
        model = decoder(kind, folders, ranks)
        if is_fused:
            model.fuse(PLAIN)
        shape = model.adapter_shape
        slots = AdapterSlots(shape, 2, 8, torch.device("cpu"), torch.float32, model.adapter_parts)
        for slot, adapter in enumerate(_adapters(model)):
            slots.load(AdapterLoad(slot, str(slot), adapter))
        return [logits(model, count, SlotAdapt(slots, torch.arange(count) % 3 - 1, PLAIN)) for count in (FEW, MANY)]

    expected = in_ranks(1, run)[0]
    assert_alike(in_ranks(2, run), expected)
    base = in_ranks(1, lambda ranks: logits(decoder(kind, folders, ranks), FEW))[0]
    assert (expected[0][1:] - base[1:]).abs().max() > 0.1


def _adapters(model: DecoderModel) -> list[Adapter]:
    first, second = (random_adapter(model.adapter_shape, 6, seed) for seed in (1, 2))
    return [first, replace(second, proj_input="block_norm") if model.adapter_shape.is_parallel else second]


@pytest.mark.parametrize("kind", ["md2", "md3", "llama", "qwen3_moe"])
def test_a_rank_reads_its_part_of_each_matrix_and_no_more(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_read = Checkpoint.read, 0

    def counted(self: Checkpoint, name: str, part: Part | None = None) -> Tensor:
        nonlocal num_read
        found = read(self, name, part)
        num_read += found.numel()
        return found

    whole = dict(text_of(decoder(kind, folders)).named_parameters())
    monkeypatch.setattr(Checkpoint, "read", counted)
    own = text_of(decoder(kind, folders, RankGroup(1, 2)))
    parts = parts_of(own)
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, parts[name].cut(whole[name]) if name in parts else whole[name]), name
    matrices = {name for name in whole if re.search(r"(qkv|proj|fc\d|gate_up|down|lm_head).weight", name)}
    assert matrices <= parts.keys()
    if not kind.startswith("md"):  # those read a vision tower too
        assert num_read == sum(parameter.numel() for parameter in own.parameters())
        assert all(2 * own.get_parameter(name).numel() == whole[name].numel() for name in matrices)


def text_of(model: DecoderModel) -> TextDecoder:
    text = getattr(model, "_text")  # noqa: B009 - what a runtime does not see
    assert isinstance(text, TextDecoder)
    return text


@pytest.mark.parametrize(("kind", "field"), [("md2", "text.n_heads"), ("llama", "num_attention_heads")])
def test_a_model_that_ranks_cannot_share_is_refused_by_its_field(
    kind: str, field: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: 3 does not divide {field}"):
        decoder(kind, folders, RankGroup(0, 3))
