"""What the KV cache holds: norms per layer and the page table of a context, and what a second question shares with it.

python examples/inspect_kv.py --image examples/images/01.png --prompt "How many bees are there?"

Without --weights it is the embedded demonstration model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kestrel.cache import CacheManager
from kestrel.config import RuntimeConfig
from kestrel.errors import KestrelError
from kestrel.families import load, resolve
from kestrel.images.decode import ImageLimits, decode_image
from kestrel.moondream.decoder import MoondreamRuntime
from kestrel.moondream.prompts import moondream_profile
from kestrel.moondream.spec import LoadedMoondream
from kestrel.request import CacheNamespace, GenerationRequest, RequestMetrics
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.scheduler import GenerationScheduler
from kestrel.skills.query import QuerySkill
from kestrel.tokens import ContextItem, ImageSpan


@dataclass(frozen=True)
class CachedPrefix:
    """Where the cached part of a context lies."""

    num_positions: int
    pages: list[int]
    num_shared_pages: int
    """So many of `pages` are full and used as they are; one more, partly filled, would be copied first."""


class Inspector:
    """One model, its cache and its scheduler, driven by hand."""

    def __init__(self, config: RuntimeConfig, image: str | None, max_new_tokens: int) -> None:
        device = choose_device(config)
        loaded = load(resolve(config), device, choose_dtype(config, device))
        assert isinstance(loaded, LoadedMoondream)
        self.runtime = MoondreamRuntime(loaded.model, config)
        self.cache = CacheManager(self.runtime.limits.num_pages, config.page_size)
        self.scheduler = GenerationScheduler(self.runtime, self.cache)
        self.profile = moondream_profile(loaded.config, loaded.tokenizer, loaded.name)
        limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.honour_exif_orientation)
        self.image = None if image is None else decode_image(image, limits)
        self.max_new_tokens = max_new_tokens

    def request(self, question: str) -> GenerationRequest:
        skill, profile = QuerySkill(), self.profile
        settings = {"max_tokens": self.max_new_tokens, "temperature": 0}
        fields = {"image": self.image, "question": question, "reasoning": False, "settings": settings}
        parsed = skill.parse(fields, profile)
        images = {} if self.image is None else {self.image.digest: self.image}
        num_positions = self.runtime.decoder.shape.num_image_positions
        prompt = skill.prompt(parsed, [ImageSpan(digest, num_positions) for digest in images], profile)
        consumer = skill.start(parsed, profile)
        return GenerationRequest(question, prompt.items, prompt.grammar, prompt.sampling, consumer, images)

    def answer(self, request: GenerationRequest) -> tuple[str, RequestMetrics]:
        self.scheduler.add(request)
        while True:
            for update in self.scheduler.step():
                if update.error is not None:
                    raise update.error
                if update.output is not None and update.metrics is not None:
                    return update.output.text, update.metrics

    def cached_prefix(self, items: Sequence[ContextItem]) -> CachedPrefix:
        """What a request with these items would find; the lease is given back at once."""
        lease = self.cache.acquire(CacheNamespace(), items)
        partly_filled = [source for source, _ in lease.copies]
        found = CachedPrefix(
            lease.num_cached, lease.pages[: lease.num_shared_pages] + partly_filled, lease.num_shared_pages
        )
        lease.release()
        return found

    def norms(self, prefix: CachedPrefix, layer: int) -> list[torch.Tensor]:
        """The norms of K and V by position, each the mean over heads: [num_positions]."""
        positions, size = torch.arange(prefix.num_positions), self.runtime.kv_cache.page_size
        pages = torch.tensor(prefix.pages)[positions // size]
        return [
            cache[pages.to(cache.device), (positions % size).to(cache.device)].float().norm(dim=2).mean(dim=1)
            for cache in self.runtime.kv_cache.layer(layer)
        ]


def print_norms(inspector: Inspector, items: Sequence[ContextItem], prefix: CachedPrefix) -> None:
    span = items[0].num_positions if isinstance(items[0], ImageSpan) else 0
    parts = {"image": slice(0, span), "text": slice(span, prefix.num_positions)}
    shown = {name: part for name, part in parts.items() if part.stop > part.start}
    print("layer", *(f"{f'|{kv}| {name}':>14}" for name in shown for kv in "KV"))
    for layer in range(inspector.runtime.decoder.shape.num_layers):
        norms = inspector.norms(prefix, layer)
        print(f"{layer:>5}", *(f"{norm[part].mean():>14.4f}" for part in shown.values() for norm in norms))


def inspect(inspector: Inspector, first_question: str, second_question: str) -> None:
    first, second = inspector.request(first_question), inspector.request(second_question)
    text, metrics = inspector.answer(first)
    print(f"first answer: {text!r} ({metrics.input_tokens} positions, {metrics.cached_tokens} cached)")
    prefix = inspector.cached_prefix(first.items)
    print_norms(inspector, first.items, prefix)
    print(f"page table ({prefix.num_positions} positions, {inspector.cache.page_size} a page):", *prefix.pages)
    shared = inspector.cached_prefix(second.items)
    print(
        f"a second question finds {shared.num_positions} of {second.num_prompt_positions} positions: "
        f"{shared.num_shared_pages} pages shared, {len(shared.pages) - shared.num_shared_pages} copied"
    )
    text, metrics = inspector.answer(second)
    print(f"second answer: {text!r} ({metrics.input_tokens} positions, {metrics.cached_tokens} cached)")
    inspector.scheduler.check_integrity()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a model folder; the embedded demonstration model if left out")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--second-prompt", default="What colour is it?")
    parser.add_argument("--image")
    for flag, default in (("--max-new-tokens", 16), ("--page-size", 16)):
        parser.add_argument(flag, type=int, default=default)
    for flag in ("--device", "--dtype"):
        parser.add_argument(flag, default="auto")
    args = parser.parse_args(argv)
    try:
        config = RuntimeConfig(model_path=args.weights, device=args.device, dtype=args.dtype, page_size=args.page_size)
        inspect(Inspector(config, args.image, args.max_new_tokens), args.prompt, args.second_prompt)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
