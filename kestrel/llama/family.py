"""The family's entry in the table of models. A folder in the hub's format is what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kestrel.adapters import AdapterShape
from kestrel.errors import CheckpointError
from kestrel.llama.chat import chat_format
from kestrel.llama.config import MODEL_TYPES, NOTHING, LlamaConfig, read_generation
from kestrel.llama.model import LlamaModel, adapter_shape, decoder_shape, load_llama
from kestrel.llama.random_models import random_llama, write_random_folder
from kestrel.llama.releases import FAMILY, RANDOM_NAMES
from kestrel.models.chat_files import ChatFiles, read_chat_files
from kestrel.models.checkpoint_files import open_checkpoint
from kestrel.models.contract import DecoderModel
from kestrel.models.decoder import TextModelDecoder
from kestrel.models.family import LoadedModel, Progress
from kestrel.models.gguf.config import read_chat_template
from kestrel.models.gguf.header import is_gguf
from kestrel.models.locate import LocatedModel
from kestrel.models.tokenizer import TextTokenizer
from kestrel.parallel.ranks import ALONE, Ranks
from kestrel.ready_model import ModelFamily
from kestrel.skills.base import ChatFormat, ModelProfile


@dataclass(frozen=True)
class LoadedLlama(LoadedModel[LlamaModel, LlamaConfig]):
    family = FAMILY
    chat_files: ChatFiles = field(default_factory=ChatFiles)


class LlamaFamily(ModelFamily):
    name = FAMILY
    kinds = MODEL_TYPES
    random_names = RANDOM_NAMES

    def owns(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in self.kinds

    def adapter_shape(self, config: Mapping[str, Any]) -> AdapterShape:
        return adapter_shape(LlamaConfig.from_dict(config))

    def load(
        self,
        located: LocatedModel,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
    ) -> LoadedLlama:
        config = LlamaConfig.from_dict(located.config, _generation(located))
        tokenizer = TextTokenizer.from_file(located.tokenizer)
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{located.tokenizer} has {tokenizer.vocab_size} ids, but the model only {config.vocab_size}; "
                "pass the model's own tokenizer.json as tokenizer_path"
            )
        files = _chat_files(located)
        config = replace(config, stop_ids=_stop_ids(config, files, tokenizer))
        if not config.stop_ids:
            raise CheckpointError("config.json: eos_token_id is missing; name the ids that end a text")
        with open_checkpoint(located.weights) as checkpoint:
            model = load_llama(checkpoint, config, device, dtype, progress, ranks)
        return LoadedLlama(located.name, model, config, tokenizer, chat_files=files)

    def decoder(self, loaded: LoadedModel[Any, Any]) -> DecoderModel:
        config = loaded.config
        return TextModelDecoder(loaded.model, decoder_shape(config), adapter_shape(config))

    def profile(self, loaded: LoadedModel[Any, Any]) -> ModelProfile:
        """A start id opens contexts only if the tokenizer puts it there: some models have one and never see it."""
        config, tokenizer = loaded.config, loaded.tokenizer
        return ModelProfile(
            name=loaded.name,
            tokenizer=tokenizer,
            bos=config.bos_id if tokenizer.start_id == config.bos_id else None,
            stop_ids=config.stop_ids,
            defaults=config.defaults,
        )

    def chat(self, loaded: LoadedModel[Any, Any], template: Path | None, tool_parser: str | None) -> ChatFormat | None:
        """Templates may name the start and the end of a text even where no file says what they are."""
        assert isinstance(loaded, LoadedLlama)
        ids = {"bos_token": loaded.config.bos_id, "eos_token": loaded.config.stop_ids[0]}
        names = {
            token: loaded.tokenizer.token_name(token_id) for token, token_id in ids.items() if token_id is not None
        }
        files = loaded.chat_files
        if not files.special_tokens:
            files = replace(files, special_tokens={token: name for token, name in names.items() if name is not None})
        return chat_format(files, loaded.tokenizer, template, tool_parser)

    def random(self, name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str]) -> LoadedLlama:
        return LoadedLlama(f"random-{name}", *random_llama(name, device, dtype, pieces))

    def write_random(self, name: str, folder: Path, pieces: Iterable[str]) -> None:
        write_random_folder(name, folder, pieces)


# ---------------------------------------------------------------------- what lies beside the weights
# A GGUF file says everything itself: what lies beside it may belong to another model.


def _generation(located: LocatedModel) -> Mapping[str, Any]:
    return NOTHING if is_gguf(located.weights) else read_generation(located.weights.parent)


def _chat_files(located: LocatedModel) -> ChatFiles:
    if is_gguf(located.weights):
        return ChatFiles(read_chat_template(located.weights), str(located.weights))
    return read_chat_files((located.weights.parent, located.tokenizer.parent))


def _stop_ids(config: LlamaConfig, files: ChatFiles, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Those of the configs, and the tokenizer's own: only there do some chat models name the end of a turn."""
    name = files.special_tokens.get("eos_token")
    named = [token_id for token_id, token in tokenizer.added_tokens.items() if token.content == name]
    return tuple(dict.fromkeys((*config.stop_ids, *named)))
