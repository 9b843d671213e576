"""The two ways to name Moondream's weights, and the way between them.

Hub files use `model.` and this engine's own parameter names; the publisher's .pt files (and Moondream 3.1) use older
module names and keep the two Fourier tables transposed. `{i}` stands for a block number.
"""

from __future__ import annotations

import re

_MODULES = (
    ("text.blocks.{i}.ln", "text_model.transformer.h.{i}.ln"),
    ("text.blocks.{i}.attn.qkv", "text_model.transformer.h.{i}.mixer.Wqkv"),
    ("text.blocks.{i}.attn.proj", "text_model.transformer.h.{i}.mixer.out_proj"),
    ("text.blocks.{i}.mlp.fc1", "text_model.transformer.h.{i}.mlp.fc1"),
    ("text.blocks.{i}.mlp.fc2", "text_model.transformer.h.{i}.mlp.fc2"),
    ("text.blocks.{i}.mlp.router", "text_model.transformer.h.{i}.gate"),
    ("text.post_ln", "text_model.lm_head.ln"),
    ("text.lm_head", "text_model.lm_head.linear"),
    ("vision.patch_emb", "vision_encoder.encoder.model.visual.patch_embed.linear"),
    ("vision.blocks.{i}.ln1", "vision_encoder.encoder.model.visual.blocks.{i}.norm1"),
    ("vision.blocks.{i}.ln2", "vision_encoder.encoder.model.visual.blocks.{i}.norm2"),
    ("vision.blocks.{i}.attn.qkv", "vision_encoder.encoder.model.visual.blocks.{i}.attn.qkv"),
    ("vision.blocks.{i}.attn.proj", "vision_encoder.encoder.model.visual.blocks.{i}.attn.proj"),
    ("vision.blocks.{i}.mlp.fc1", "vision_encoder.encoder.model.visual.blocks.{i}.mlp.fc1"),
    ("vision.blocks.{i}.mlp.fc2", "vision_encoder.encoder.model.visual.blocks.{i}.mlp.fc2"),
    ("vision.post_ln", "vision_encoder.encoder.model.visual.norm"),
    ("vision.proj_mlp.fc1", "vision_encoder.projection.mlp.fc1"),
    ("vision.proj_mlp.fc2", "vision_encoder.projection.mlp.fc2"),
    ("region.coord_encoder", "region_model.coordinate_encoder"),
    ("region.size_encoder", "region_model.size_encoder"),
    ("region.coord_decoder.fc1", "region_model.coordinate_decoder.fc1"),
    ("region.coord_decoder.fc2", "region_model.coordinate_decoder.fc2"),
    ("region.size_decoder.fc1", "region_model.size_decoder.fc1"),
    ("region.size_decoder.fc2", "region_model.size_decoder.fc2"),
    ("region.coord_decoder", "region_model.coordinate_head"),
    ("region.size_decoder", "region_model.size_head"),
    ("region.ln", "region_model.ln"),
)
"""Modules with a weight and a bias."""

_EXPERTS = (
    ("text.blocks.{i}.mlp.fc1.weight", "text_model.transformer.h.{i}.mlp.experts.weight"),
    ("text.blocks.{i}.mlp.fc2.weight", "text_model.transformer.h.{i}.mlp.output_experts.weight"),
)
"""Three-dimensional in hub files, where dense and expert matrices share their names."""

_TENSORS = (
    ("text.wte", "text_model.transformer.embd.wte.weight"),
    ("text.blocks.{i}.attn.tau.wq", "text_model.transformer.h.{i}.tau_wq"),
    ("text.blocks.{i}.attn.tau.wv", "text_model.transformer.h.{i}.tau_wv"),
    ("text.blocks.{i}.attn.tau.alpha", "text_model.transformer.h.{i}.tau_alpha"),
    ("text.blocks.{i}.attn.tau.wqwv", "text_model.transformer.h.{i}.tau_wqwv"),
    ("text.blocks.{i}.moe_quant.up_scale", "text_model.transformer.h.{i}.moe_quant.up_scale"),
    ("text.blocks.{i}.moe_quant.down_scale", "text_model.transformer.h.{i}.moe_quant.down_scale"),
    ("text.blocks.{i}.kv_quantizer.k_scale", "text_model.transformer.h.{i}.kv_quantizer.k_scale"),
    ("text.blocks.{i}.kv_quantizer.v_scale", "text_model.transformer.h.{i}.kv_quantizer.v_scale"),
    ("vision.pos_emb", "vision_encoder.encoder.model.visual.pos_embed"),
    ("region.coord_features", "region_model.coordinate_features.weight"),
    ("region.size_features", "region_model.size_features.weight"),
)

FOURIER_TABLES = ("region.coord_features", "region.size_features")
"""Kept in fp32, and stored transposed under their .pt names."""

_PT_PREFIXES = ("text_model.", "vision_encoder.", "region_model.")


def has_pt_name(name: str) -> bool:
    return _plain(name).startswith(_PT_PREFIXES)


def to_hub_name(name: str) -> str:
    """The parameter name for a tensor name of either kind; an unknown name comes back without its wrappings."""
    plain = _plain(name)
    if not plain.startswith(_PT_PREFIXES):
        return plain.removeprefix("model.")
    for pattern, hub in _PT_TO_HUB:
        match = pattern.fullmatch(plain)
        if match:
            return _fill(hub, match)
    return plain


def to_pt_name(hub_name: str, num_dims: int) -> str:
    """The .pt name of a parameter. Expert matrices have three dimensions."""
    table = _EXPERTS_TO_PT if num_dims == 3 and hub_name.startswith("text.") else _HUB_TO_PT
    for pattern, pt in table:
        match = pattern.fullmatch(hub_name)
        if match:
            return _fill(pt, match)
    raise ValueError(f"{hub_name!r} has no .pt name")


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return name.replace("._orig_mod", "").removeprefix("_orig_mod.")


def _fill(template: str, match: re.Match[str]) -> str:
    groups = match.groupdict()
    return template.replace("{i}", groups.get("i", "")) + groups.get("tail", "")


def _pattern(template: str, tail: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)") + tail)


def _patterns(source: int, target: int) -> list[tuple[re.Pattern[str], str]]:
    tail = r"(?P<tail>\.(weight|bias)(\.packed|\.scale|\.zero_point)?)"
    modules = [(_pattern(pair[source], tail), pair[target]) for pair in _MODULES]
    return modules + [(_pattern(pair[source], ""), pair[target]) for pair in _TENSORS]


_EXPERTS_TO_PT = [(_pattern(hub, ""), pt) for hub, pt in _EXPERTS]
_HUB_TO_PT = _patterns(0, 1)
_PT_TO_HUB = _patterns(1, 0) + [(_pattern(pt, ""), hub) for hub, pt in _EXPERTS]
