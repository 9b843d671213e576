"""The Moondream family's entry in the table of families: how a model of it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kestrel.adapters import AdapterShape
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, open_checkpoint
from kestrel.models.contract import DecoderModel
from kestrel.models.family import LoadedModel, Progress
from kestrel.models.locate import LocatedModel
from kestrel.models.published import ModelSpec
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.decoder import MoondreamDecoder, MoondreamVision, adapter_shape
from kestrel.moondream.prompts import moondream_profile
from kestrel.moondream.random_models import random_moondream, random_parts, write_random_folder
from kestrel.moondream.refiner import OUTLINE_SIDE_PX, load_outline_refiner
from kestrel.moondream.releases import FAMILY, MODELS, RANDOM_NAMES
from kestrel.moondream.weights import (
    LoadedMoondream,
    load_moondream,
    read_kv_scales,
    refuse_mlx_int4,
    to_hub_name,
)
from kestrel.parallel.ranks import ALONE, Ranks
from kestrel.ready_model import MakeDecoder, ModelFamily, ReadyModel
from kestrel.skills.base import ModelProfile


class MoondreamFamily(ModelFamily):
    name = FAMILY
    kinds = (FAMILY,)
    shape_sections = ("text", "vision")
    random_names = RANDOM_NAMES

    def owns(self, config: Mapping[str, Any]) -> bool:
        return {"text", "vision", "region"} <= config.keys()

    def recognise(self, checkpoint: Checkpoint) -> str | None:
        """By tau attention and by the shape of the embedding. Both releases of Moondream 3 look alike."""
        infos = {to_hub_name(name): info for name, info in checkpoint.tensors.items()}
        refuse_mlx_int4(infos, str(checkpoint.path))
        has_tau = any(".attn.tau." in name for name in infos)
        for spec in MODELS:
            text = MoondreamConfig.from_dict(spec.config).text
            wte = infos.get("text.wte")
            if wte is not None and wte.shape == (text.vocab_size, text.dim) and has_tau == text.tau_attn:
                return spec.name
        return None

    def adapter_shape(self, config: Mapping[str, Any]) -> AdapterShape:
        return adapter_shape(MoondreamConfig.from_dict(config).text)

    def load(
        self,
        located: LocatedModel,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
    ) -> LoadedMoondream:
        config = MoondreamConfig.from_dict(located.config)
        tokenizer = TextTokenizer.from_file(located.tokenizer)
        _check_tokenizer(located, tokenizer, config)
        with open_checkpoint(located.weights) as checkpoint:
            kv_scales = read_kv_scales(checkpoint)
            hint = self._hint(checkpoint, located)
            model = load_moondream(checkpoint, config, device, dtype, progress, hint, ranks)
        return LoadedMoondream(located.name, model, model.config, tokenizer, kv_scales)

    def make_ready(
        self,
        loaded: LoadedModel[Any, Any],
        config: RuntimeConfig,
        with_adapters: bool = False,
        make_decoder: MakeDecoder | None = None,
    ) -> ReadyModel:
        ready = super().make_ready(loaded, config, with_adapters, make_decoder)
        if config.refiner_file is None:
            return ready
        refiner = load_outline_refiner(config.refiner_file, loaded.model)
        return replace(ready, refiner=refiner, picture_form=MoondreamVision(loaded.model).picture_form(OUTLINE_SIDE_PX))

    def _hint(self, checkpoint: Checkpoint, located: LocatedModel) -> str:
        """What to pass instead, for weights that fit another registered model."""
        name = self.recognise(checkpoint)
        if name is None or _spec(name).config == located.config:
            return ""
        by_name = any(spec.config == located.config for spec in MODELS)
        first = "" if by_name else "remove the config.json beside them and "
        return f'these weights look like {name}; {first}pass model="{name}"'

    def decoder(self, loaded: LoadedModel[Any, Any]) -> DecoderModel:
        return MoondreamDecoder(loaded.model)

    def profile(self, loaded: LoadedModel[Any, Any]) -> ModelProfile:
        return moondream_profile(loaded.config, loaded.tokenizer, loaded.name)

    def random(
        self, name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str]
    ) -> LoadedMoondream:
        return random_moondream(name, device, dtype, pieces)

    def write_random(self, name: str, folder: Path, pieces: Iterable[str]) -> None:
        config, tokenizer = random_parts(name, pieces)
        write_random_folder(folder, config, 0, tokenizer.to_str())


def _spec(name: str) -> ModelSpec:
    return next(spec for spec in MODELS if spec.name == name)


def _check_tokenizer(located: LocatedModel, tokenizer: TextTokenizer, config: MoondreamConfig) -> None:
    if tokenizer.vocab_size > config.text.vocab_size:
        raise CheckpointError(
            f"{located.tokenizer} has {tokenizer.vocab_size} ids, the model only {config.text.vocab_size}; "
            "pass the model's own tokenizer.json as tokenizer_path"
        )
    for token_id in (config.tokenizer.bos_id, config.tokenizer.eos_id):
        if token_id not in tokenizer.special_ids:
            raise CheckpointError(
                f"{located.tokenizer} does not fit the model: its id {token_id} is the text "
                f"{tokenizer.token_name(token_id)!r} where the model expects the end of text. Releases since 2025-06 "
                "need the tokenizer.json of moondream/starmie-v1, not the one inside vikhyatk/moondream2; "
                "pass it as tokenizer_path"
            )
