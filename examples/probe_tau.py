"""The tau factors of a Moondream 3: how strongly each head scales its queries and values over a prompt.

python examples/probe_tau.py --weights ~/models/moondream3 --image examples/images/01.png --prompt "What is this?"

A factor is tanh(w · GELU(qkv)) + 0.5 + sigmoid(alpha · ln(position + 1)), between -0.5 and 2.5. Heads stuck at one
value over all positions, or factors that differ between two builds, show where a regression starts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import CheckpointError, KestrelError
from kestrel.layers.attention import Tau


class TauRecorder:
    """Notes what every Tau module returns, layer by layer in the order they run."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        handle = register_module_forward_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, given: tuple[Any, ...], factors: Any) -> None:
        if isinstance(module, Tau):
            positions_T, (tau_q_TH, tau_v_TH) = given[1], factors
            self._layers.setdefault(module, []).append((positions_T.cpu(), tau_q_TH.cpu(), tau_v_TH.cpu()))

    def layers(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer: positions [T], tau_q [T, H] and tau_v [T, H] of everything that ran."""
        joined = []
        for calls in self._layers.values():
            positions, tau_q, tau_v = (torch.cat(parts) for parts in zip(*calls, strict=True))
            joined.append((positions, tau_q, tau_v))
        return joined


async def probe(config: RuntimeConfig, image: str | None, prompt: str) -> TauRecorder:
    """One token through the engine that serves requests: all positions of the prompt are prefilled."""
    recorder = TauRecorder()
    async with await InferenceEngine.create(config) as engine:
        with recorder.recording():
            await engine.query(image, prompt, reasoning=False, temperature=0, max_new_tokens=1)
    if not recorder.layers():
        raise CheckpointError(f"{engine.model_name} has no tau attention; give a Moondream 3 model")
    return recorder


def print_table(recorder: TauRecorder, position: int | None) -> None:
    layers = recorder.layers()
    num_positions, num_heads = layers[0][1].shape
    where = f"{num_positions} positions" if position is None else f"position {position}"
    print(f"{len(layers)} layers, {num_heads} heads, {where}")
    print(f"{'layer':>5} {'head':>4} {'tau_q':>8} {'min':>8} {'max':>8} {'tau_v':>8} {'min':>8} {'max':>8}")
    for layer, (positions, *factors) in enumerate(layers):
        chosen = slice(None) if position is None else positions == position
        for head in range(num_heads):
            values = [tau[chosen, head] for tau in factors]
            cells = [f"{number:8.4f}" for v in values for number in (v.mean(), v.min(), v.max())]
            print(f"{layer:>5} {head:>4}", *cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--weights", "--prompt"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--image")
    parser.add_argument("--position", type=int, help="one position only; default: mean, min and max over the prompt")
    for flag in ("--device", "--dtype"):
        parser.add_argument(flag, default="auto")
    args = parser.parse_args(argv)
    try:
        config = RuntimeConfig(model_path=args.weights, device=args.device, dtype=args.dtype, max_batch_size=1)
        recorder = asyncio.run(probe(config, args.image, args.prompt))
        num_positions = len(recorder.layers()[0][0])
        if args.position is not None and not 0 <= args.position < num_positions:
            parser.error(f"--position {args.position}: the prompt has positions 0 to {num_positions - 1}")
        print_table(recorder, args.position)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
