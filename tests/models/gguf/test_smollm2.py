"""A real small model from its GGUF file: tokenizer, greedy tokens and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.models.gguf.config import read_chat_template, read_hub_config
from kestrel.models.gguf.header import GgufHeader
from kestrel.models.tokenizer import TextTokenizer
from tests.exhaustive import sweep

TURN = "<|im_start|>"
PROMPTS = [
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a small village,", "2 + 2 =",
    "Water boils at", "The three primary colours are", "To make a cup of tea, first", "In 1969,",
    "Dear Sir or Madam,", "import numpy as np\n\n", "The opposite of hot is", "A list of fruits:\n1.",
    "Shakespeare wrote", "Der Hund läuft", "La vie est", "The sun rises in the", "Photosynthesis is the process by",
    "My favourite book is", "SELECT name FROM", "Q: Who painted the Mona Lisa?\nA:",
]  # fmt: skip


@pytest.fixture
async def engine(smollm2: Path) -> AsyncIterator[InferenceEngine]:
    config = RuntimeConfig(model_path=smollm2, device="cpu", max_seq_length=512, kv_cache_pages=800)
    engine = await InferenceEngine.create(config)
    yield engine
    await engine.shutdown(drain=False, timeout_s=20)


def test_config_template_and_ends_are_those_of_the_file(smollm2: Path) -> None:
    config = read_hub_config(smollm2)
    sizes = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    assert [config[name] for name in sizes] == [576, 30, 9, 3, 8192]
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"][0] == 2
    template = read_chat_template(smollm2)
    assert template is not None
    assert TURN in template


def merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE as it is defined: the pair of the lowest rank first, the leftmost of it."""
    parts = list(word)
    while len(parts) > 1:
        pairs = [(ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        if rank == len(ranks):
            break
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts


TEXTS = [
    "Hello, world! It's 2024 and we're   here.\n\n\tdone ",
    "naïve café ½ Ⅷ ٣٤ 漢字 こんにちは 😀👩‍👩‍👧",
    "x=1;\r\nfor(i=0;i<10;i++){}",
    "<|im_start|>user\nhi<|im_end|>",
    " leading",
    "trailing   ",
    "\u200b\u00a0\u3000",
    "don't DON'T I'LL",
]


def test_ids_are_what_the_metadata_defines(smollm2: Path) -> None:
    import regex  # noqa: PLC0415 - comes with transformers

    metadata = GgufHeader.read(smollm2).values
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    ids = {text: number for number, text in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    word = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer = TextTokenizer.from_file(smollm2)
    for text in TEXTS:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]  # digits stand alone
        words = [found for piece in pieces for found in word.findall(piece)]
        spelled = ["".join(letters[byte] for byte in each.encode()) for each in words]
        assert tokenizer.encode(text) == [ids[part] for each in spelled for part in merged(each, ranks)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.start_id is None
    assert not tokenizer.special_ids & {number for text in TEXTS for number in tokenizer.encode(text)}


@pytest.fixture(scope="module")
def published(smollm2: Path) -> Any:
    """`transformers` with the same tensors."""
    from tests.llama.reference import of_gguf  # noqa: PLC0415 - imports transformers

    return of_gguf(smollm2)


@torch.inference_mode()
def follows(model: Any, prompt: list[int], found: list[int]) -> bool:
    """Whether each token is the likeliest after those before it, ends aside: then all of them are the greedy ones."""
    logits = model(torch.tensor([prompt + found])).logits[0]
    logits[:, model.config.eos_token_id] = -torch.inf
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == found


@sweep(("count", "length"), [(20, 64)], always=[])
async def test_greedy_tokens_are_those_of_transformers(
    count: int, length: int, engine: InferenceEngine, published: Any
) -> None:
    tokenizer = engine.profile.tokenizer
    prompts = [tokenizer.encode(text) for text in PROMPTS[:count]]
    fields = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
    results = await asyncio.gather(*(engine.run("complete", prompt=ids, **fields) for ids in prompts))
    for text, ids, result in zip(PROMPTS, prompts, results, strict=False):
        found = result.output["token_ids"]
        assert len(found) == length
        assert follows(published, ids, found), text
        assert not follows(published, ids, [*found[:-1], found[-1] ^ 1])
    assert results[0].output["text"].startswith(" Paris")
