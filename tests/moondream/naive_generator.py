"""One sequence through a Moondream with dense keys and values, step by step, under any grammar.

Nothing is paged, batched or cached but the embeddings of pictures. A run keeps every step it made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kestrel.grammar import END, Carries, Grammar, State
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Heads
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.region import NEAR, coord_from_bins, size_from_bins
from kestrel.request import FinishReason
from kestrel.skills.base import Tokenizer
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, Token

from .patches import image_patches
from .seen_crops import encoded_once

Choose = Callable[[Tensor], int]
"""Picks a token id from (masked) logits [V]."""

NO_BLOCK = -1


def greedy(logits_V: Tensor) -> int:
    return int(logits_V.argmax())


def forced(ids: Sequence[int]) -> Choose:
    """Teacher forcing: the given ids in order, whatever the logits say."""
    remaining = iter(ids)
    return lambda _: next(remaining)


class DenseAttention:
    """Keeps keys and values of every layer; key k is visible to query q iff k ≤ q or both are in one image block."""

    def __init__(self) -> None:
        self.block_of: list[int] = []
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        q_THD, k_THD, v_THD = heads.rotated()
        if layer in self._stored:
            old_k, old_v = self._stored[layer]
            k_THD, v_THD = torch.cat([old_k, k_THD]), torch.cat([old_v, v_THD])
        self._stored[layer] = (k_THD, v_THD)
        groups = q_THD.shape[1] // k_THD.shape[1]
        k_all, v_all = k_THD.repeat_interleave(groups, dim=1), v_THD.repeat_interleave(groups, dim=1)
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.to(wide), k_all.to(wide)) * q_THD.shape[2] ** -0.5
        scores_HTS = scores_HTS.masked_fill(~self._visible(q_THD.shape[0]).to(q_THD.device), float("-inf"))
        mixed_TD = torch.einsum("hts,shd->thd", scores_HTS.softmax(dim=2), v_all.to(wide)).to(q_THD.dtype).flatten(1)
        return mixed_TD

    def _visible(self, num_queries: int) -> Tensor:
        block = torch.tensor(self.block_of)
        keys = torch.arange(len(block))
        queries = keys[len(block) - num_queries :]
        same_block = (block[queries][:, None] == block[None]) & (block[None] != NO_BLOCK)
        return (keys[None] <= queries[:, None]) | same_block


@dataclass(frozen=True)
class Step:
    """One forward pass: what the last of its positions gave."""

    start: int
    hidden_D: Tensor
    logits_V: Tensor


@dataclass
class Run:
    """One sequence in progress and all it did."""

    steps: list[Step] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    coord_logits: list[Tensor] = field(default_factory=list)  # each [bins]
    size_logits: list[Tensor] = field(default_factory=list)  # each [2, bins]
    finish: FinishReason | None = None
    output: dict[str, Any] = field(default_factory=dict)
    """The skill's result, when a skill was run."""
    attention: DenseAttention = field(default_factory=DenseAttention, repr=False)

    @property
    def last(self) -> Step:
        return self.steps[-1]

    @property
    def coord_bins(self) -> list[int]:
        return [int(logits.argmax()) for logits in self.coord_logits]

    @property
    def size_bins(self) -> list[list[int]]:
        return [logits.argmax(dim=1).tolist() for logits in self.size_logits]

    @property
    def token_ids(self) -> list[int]:
        """Ids of the text tokens."""
        return [token.id for token in self.tokens if isinstance(token, TextToken)]


class NaiveGenerator:
    def __init__(
        self,
        model: MoondreamModel,
        config: MoondreamConfig,
        tokenizer: Tokenizer,
        image_cache: dict[str, Tensor] | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.adapt = adapt
        self.device = model.text.wte.device
        self.dtype = model.text.wte.dtype
        self.image_cache: dict[str, Tensor] = {} if image_cache is None else image_cache

    @torch.inference_mode()
    def generate(
        self,
        items: Sequence[ContextItem],
        images: Mapping[str, np.ndarray],
        grammar: Grammar,
        max_new_tokens: int,
        choose: Choose = greedy,
    ) -> Run:
        """Runs until END or a spent budget. A token that goes to another phase opens a fresh budget there."""
        run = self.prefill(items, images)
        index, spent = 0, 0
        while run.finish is None:
            state = grammar.states[index]
            sampled = choose(masked(run.last.logits_V, state.suppressed, state.allowed))
            if spent >= max_new_tokens:
                assert state.when_spent is not None
                sampled = state.when_spent
            emitted, goto = grammar.advance(index, sampled)
            if goto == END:
                run.finish = FinishReason.STOP
                break
            token = self._read_token(run, emitted, state)
            run.tokens.append(token)
            following = grammar.states[goto]
            spent = spent + 1 if following.phase == state.phase else 0
            if spent >= max_new_tokens and following.when_spent is None:
                run.finish = FinishReason.LENGTH
                break
            self.feed(run, token)
            index = goto
        return run

    def _read_token(self, run: Run, emitted: int, state: State) -> Token:
        if emitted == self.config.tokenizer.coord_id and state.carries & Carries.COORD:
            return self.read_coord(run, state.end_ids)
        if emitted == self.config.tokenizer.size_id and state.carries & Carries.SIZE:
            return self.read_size(run)
        return TextToken(emitted)

    @torch.inference_mode()
    def prefill(self, items: Sequence[ContextItem], images: Mapping[str, np.ndarray]) -> Run:
        run = Run()
        parts: list[Tensor] = []
        blocks: list[int] = []
        for number, item in enumerate(items):
            parts.append(self.embed_item(item, images))
            blocks += [number if isinstance(item, ImageSpan) else NO_BLOCK] * parts[-1].shape[0]
        self._forward(run, torch.cat(parts), blocks)
        return run

    @torch.inference_mode()
    def feed(self, run: Run, token: Token) -> None:
        self._forward(run, self.embed_item(token, {}), [NO_BLOCK])

    def _forward(self, run: Run, x_TD: Tensor, blocks: list[int]) -> None:
        start = len(run.attention.block_of)
        run.attention.block_of += blocks
        positions = torch.arange(start, start + len(blocks), device=self.device)
        hidden_TD = self.model.text(x_TD, positions, run.attention, self.adapt)
        run.steps.append(Step(start, hidden_TD[-1], self.model.text.logits(hidden_TD[-1:])[0]))

    def embed_item(self, item: ContextItem, images: Mapping[str, np.ndarray]) -> Tensor:
        if isinstance(item, TextToken):
            return self._embed_id(item.id)
        if isinstance(item, CoordToken):
            return self.model.region.encode_coord(torch.tensor([item.value], device=self.device))
        if isinstance(item, SizeToken):
            return self.model.region.encode_size(torch.tensor([[item.width, item.height]], device=self.device))
        embeddings = self.embed_image(item.digest, images[item.digest])
        if item.bos_id is not None:
            embeddings = torch.cat([self._embed_id(item.bos_id), embeddings])
        assert embeddings.shape[0] == item.num_positions
        return embeddings

    def _embed_id(self, token_id: int) -> Tensor:
        return self.model.text.embed(torch.tensor([token_id], device=self.device))

    @torch.inference_mode()
    def embed_image(self, digest: str, pixels_HWC: np.ndarray) -> Tensor:
        if digest not in self.image_cache:
            patches, tiles_hw = image_patches(pixels_HWC, self.config.vision)
            self.image_cache[digest] = self.model.vision.embed_image(self._features(patches), tiles_hw)
        return self.image_cache[digest]

    def _features(self, patches_NPC: Tensor) -> Tensor:
        vision, on_device_NPC = self.model.vision, patches_NPC.to(self.device, self.dtype)
        if on_device_NPC.is_cuda:
            return vision.encode_crops(on_device_NPC)
        return encoded_once(vision, on_device_NPC, vision.encode_crops)

    def read_coord(self, run: Run, end_ids: Sequence[int] = ()) -> CoordToken:
        """With its log-probability: that it is about there, and that it comes instead of one of `end_ids`."""
        logits = self.model.region.decode_coord(run.last.hidden_D[None])[0]
        run.coord_logits.append(logits)
        choices = run.last.logits_V.double()[[self.config.tokenizer.coord_id, *end_ids]].softmax(0)
        logprob = math.log(float(choices[0]) * near_best(logits))
        return CoordToken(float(coord_from_bins(logits.argmax(), logits.shape[0])), logprob)

    def read_size(self, run: Run) -> SizeToken:
        logits = self.model.region.decode_size(run.last.hidden_D[None])[0]
        run.size_logits.append(logits)
        width, height = size_from_bins(logits.argmax(dim=1), logits.shape[1]).tolist()
        return SizeToken(width, height, math.log(near_best(logits[0]) * near_best(logits[1])))


def near_best(logits_C: Tensor) -> float:
    """The probability of the most likely bin and of those near to it."""
    best = int(logits_C.argmax())
    return float(logits_C.double().softmax(0)[max(0, best - NEAR) : best + NEAR + 1].sum())


def masked(logits_V: Tensor, suppressed: tuple[int, ...], allowed: tuple[int, ...] | None = None) -> Tensor:
    masked = logits_V.clone()
    if allowed is not None:
        masked.fill_(float("-inf"))
        masked[list(allowed)] = logits_V[list(allowed)]
    masked[list(suppressed)] = float("-inf")
    return masked
