"""Moondreams with random weights: folders for tests and demonstrations, and models complete in memory, for speed does
not depend on the values.

Values depend on the seed, the parameter's name and the kind of device only, not on the order they are made in.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kestrel.errors import ConfigError, shown
from kestrel.models.checkpoint_files import INDEX_NAME, TensorInfo, write_safetensors
from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.models.piece_tokenizer import NUM_CONTROL_IDS, Merges, byte_level_tokenizer, filled_up, piece_vocabulary
from kestrel.models.tokenizer import BLANK, TextTokenizer
from kestrel.moondream.config import (
    MOONDREAM2,
    MOONDREAM3,
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
    derived_generation,
)
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.releases import RANDOM_NAMES
from kestrel.moondream.weights import FOURIER_TABLES, LoadedMoondream, build_on_meta, stored_dtype, to_pt_name
from kestrel.skills.model_facts import Template

# ---------------------------------------------------------------------- weights


_SPREAD = 0.02
_NORM_WEIGHT = re.compile(r"(.*\.)?(ln|ln1|ln2|post_ln)\.weight")


def randomise_(model: MoondreamModel, seed: int) -> MoondreamModel:
    """Fills every parameter in place: norms near one, Fourier tables of spread one, the rest of spread 0.02."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill_randomly(parameter, name, seed)
    return model


def random_model(config: MoondreamConfig, seed: int, device: torch.device | str, dtype: torch.dtype) -> MoondreamModel:
    """A model made straight on `device`, at most one parameter at a time beyond its own size."""
    model = build_on_meta(config)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        values = torch.empty(parameter.shape, dtype=stored_dtype(name, dtype), device=device)
        model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
    model.reset_buffers(device)
    return randomise_(model, seed).eval()


def write_random_folder(
    path: Path,
    config: MoondreamConfig,
    seed: int,
    tokenizer_json: str,
    dtype: torch.dtype = torch.bfloat16,
    naming: Literal["hub", "pt"] = "hub",
    shards: int = 1,
) -> None:
    """A complete model folder. Hub naming gives safetensors, written tensor by tensor; pt naming gives one model.pt."""
    if naming == "pt" and shards != 1:
        raise ValueError(f"a .pt file has no shards (got shards={shards})")
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    (path / TOKENIZER_NAME).write_text(tokenizer_json, encoding="utf-8")
    shapes = {name: tuple(parameter.shape) for name, parameter in build_on_meta(config).named_parameters()}
    if naming == "pt":
        named = _random_tensors(shapes, seed, dtype)
        torch.save(dict(_with_pt_name(name, values) for name, values in named), path / "model.pt")
    elif shards == 1:
        _write_hub_file(path / "model.safetensors", shapes, seed, dtype)
    else:
        _write_shards(path, shapes, seed, dtype, shards)


def _fill_randomly(values: Tensor, name: str, seed: int) -> None:
    # The CPU generator takes only 32 bits of its seed.
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values.normal_(0.0, 1.0 if name in FOURIER_TABLES else _SPREAD, generator=generator)
    if _NORM_WEIGHT.fullmatch(name):
        values.add_(1.0)


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        values = torch.empty(shape, dtype=dtype)
        _fill_randomly(values, name, seed)
        yield name, values


def _with_pt_name(name: str, values: Tensor) -> tuple[str, Tensor]:
    return to_pt_name(name, values.ndim), values.T.contiguous() if name in FOURIER_TABLES else values


def _write_hub_file(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> None:
    infos = {f"model.{name}": TensorInfo(shape, dtype) for name, shape in shapes.items()}
    named = _random_tensors(shapes, seed, dtype)
    write_safetensors(path, infos, ((f"model.{name}", values) for name, values in named))


def _write_shards(
    path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype, shards: int
) -> None:
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        _write_hub_file(path / file_name, {name: shapes[name] for name in part}, seed, dtype)
        weight_map |= {f"model.{name}": file_name for name in part}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


# ---------------------------------------------------------------------- a tiny Moondream 3
# Its tokenizer knows some whole words and numbers, so that noise drawn from them can be read.


__all__ = ["NUM_CONTROL_IDS", "outline_ids", "tiny_random_parts", "word_ids", "write_tiny_random_folder"]

COORD_ID, SIZE_ID = 5, 6

_TEMPLATE_WORDS = "caption short normal long query detect objects point segment"
_WORDS = """
a the this that one two three some every no and or but with without under over near behind before after between
small large old new bright dark quiet loud red green blue yellow white black round square soft warm cold sweet slow
cat dog bird horse fish bee house tree river hill road field garden window door roof cloud sun moon star sky sea stone
leaf flower grass apple bread cup table chair lamp clock book letter song picture boat train wheel bridge tower child
sits stands runs sleeps sings waits looks turns falls grows opens closes carries follows finds keeps paints drinks
is was has seems very often never always almost perhaps again here there now then today tomorrow because while
"""
_OUTLINE_NUMBERS = range(0, 961, 60)
_OUTLINE_LETTERS = "MLZ"


def write_tiny_random_folder(path: Path, seed: int = 0) -> None:
    """A complete model folder; the same seed gives the same bytes."""
    config, tokenizer = tiny_random_parts()
    write_random_folder(path, config, seed, tokenizer.to_str(pretty=True), dtype=torch.float32)


def tiny_random_parts() -> tuple[MoondreamConfig, Tokenizer]:
    """Dimensions and tokenizer; the weights are left to the caller."""
    vocabulary, merges = _vocabulary()
    return _config(vocabulary), byte_level_tokenizer(vocabulary, merges)


def word_ids() -> tuple[int, ...]:
    """Ids of whole words. Sampling only from these gives noise that can be read."""
    return _ids_of(_WORDS.split())


def outline_ids() -> tuple[int, ...]:
    """Ids that outlines are spelt with: coordinates, sizes, path letters and numbers."""
    vocabulary, _ = _vocabulary()
    letters = (vocabulary[letter] for letter in _OUTLINE_LETTERS)
    return (COORD_ID, SIZE_ID, *letters, *_ids_of(str(number) for number in _OUTLINE_NUMBERS))


def _ids_of(words: Iterable[str]) -> tuple[int, ...]:
    vocabulary, _ = _vocabulary()
    return tuple(dict.fromkeys(vocabulary[BLANK + word] for word in words))


def _vocabulary() -> tuple[dict[str, int], Merges]:
    words = [*_TEMPLATE_WORDS.split(), *_WORDS.split(), *map(str, _OUTLINE_NUMBERS)]
    return piece_vocabulary(BLANK + word for word in words)


def _config(vocabulary: dict[str, int]) -> MoondreamConfig:
    vision = VisionConfig(
        enc_dim=64,
        enc_patch_size=14,
        enc_n_layers=2,
        enc_ff_dim=128,
        enc_n_heads=2,
        proj_out_dim=128,
        crop_size=378,
        in_channels=3,
        max_crops=12,
        overlap_margin=4,
        proj_inner_dim=128,
    )
    text = TextConfig(
        dim=128,
        ff_dim=256,
        n_layers=3,
        vocab_size=-(-len(vocabulary) // 64) * 64,
        max_context=2048,
        n_heads=2,
        n_kv_heads=2,
        prefix_attn=1 + vision.num_patches,
        rope_theta=1_500_000.0,
        tau_attn=True,
        moe=MoeConfig(num_experts=8, start_layer=1, experts_per_token=2, expert_inner_dim=64),
    )
    region = RegionConfig(dim=128, coord_feat_dim=64, coord_out_dim=1024, size_feat_dim=64, size_out_dim=2048)
    tokenizer = TokenizerConfig(0, 0, 3, 4, COORD_ID, SIZE_ID, 7, 9, _templates(vocabulary))
    return MoondreamConfig(text, vision, region, tokenizer, derived_generation(text, tokenizer))


def _templates(vocabulary: dict[str, int]) -> dict[str, Template]:
    word = {word: vocabulary[BLANK + word] for word in _TEMPLATE_WORDS.split()}
    templates = {
        f"caption.{length}": Template((1, word["caption"], 2, word[length], 3))
        for length in ("short", "normal", "long")
    }
    templates["query"] = Template((1, word["query"], 2), (3,))
    templates["detect"] = Template((1, word["detect"], word["objects"], 2), (3,))
    templates["point"] = Template((1, word["point"], 2), (3,))
    templates["segment"] = Template((1, word["segment"], 2), (3,))
    return templates


# ---------------------------------------------------------------------- models in memory
# They never end an answer by themselves: control ids are biased down, the end id below all others.


_FULL_SIZE = {"MD2": MOONDREAM2, "MD3": MOONDREAM3}
_TINY = "tiny"
_CONTROL_BIAS = -100.0
_END_BIAS = -200.0


def random_moondream(
    name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str] = (), seed: int = 0
) -> LoadedMoondream:
    """One of `RANDOM_NAMES`, made straight on `device`. The tokenizer of MD2 and MD3 has an id for each of `pieces`
    (see `piece_vocabulary`); that of the tiny one is its own."""
    config, tokenizer = random_parts(name, pieces)
    model = random_model(config, seed, device, dtype)
    _bias_controls_down_(model)
    return LoadedMoondream(f"random-{name}", model, config, TextTokenizer(tokenizer))


def random_parts(name: str, pieces: Iterable[str] = ()) -> tuple[MoondreamConfig, Tokenizer]:
    """Dimensions and tokenizer; the weights are left to the caller."""
    if name == _TINY:
        return tiny_random_parts()
    config = _FULL_SIZE.get(name)
    if config is None:
        raise ConfigError("random", f"{shown(name)} is not a random model; use one of: {', '.join(RANDOM_NAMES)}")
    vocabulary, merges = piece_vocabulary(pieces)
    return config, byte_level_tokenizer(filled_up(vocabulary, config.text.vocab_size), merges)


def _bias_controls_down_(model: MoondreamModel) -> None:
    with torch.no_grad():
        bias_V = model.text.lm_head.bias
        bias_V[:NUM_CONTROL_IDS] = _CONTROL_BIAS
        bias_V[model.config.tokenizer.eos_id] = _END_BIAS
