"""What a peer measured on the same workload and GPU, to stand beside our own figures."""

from __future__ import annotations

SOURCE = (
    "Peer: Kestrel 0.5.0 of m87-labs with kestrel-kernels 0.4.9 (closed CUDA kernels), measured on one NVIDIA H200 "
    "with the same workloads; Moondream 2 in bfloat16, Moondream 3 with fp8 experts and an fp8 KV cache. A dash: not "
    "measured."
)
GPU = "H200"

Key = tuple[str, str, str, int, int]
"""(model, workload, mode, max_batch_size, tokens)"""


def _by_batch(model: str, mode: str, tokens: int, values: dict[int, float]) -> dict[Key, float]:
    return {(model, "chart9", mode, size, tokens): value for size, value in values.items()}


CHART9: dict[Key, float] = {
    **_by_batch("MD2", "flood", 3, {1: 33.2, 4: 47.0, 16: 47.7, 64: 50.1}),
    **_by_batch("MD2", "flood", 30, {1: 11.9, 4: 28.1, 16: 42.5, 64: 45.6}),
    **_by_batch("MD2", "closed", 3, {1: 38.4, 4: 95.9, 16: 327, 64: 1271}),
    **_by_batch("MD2", "closed", 30, {1: 76.4, 4: 144.8, 16: 388, 64: 1393}),
    **_by_batch("MD3", "flood", 3, {1: 22.3, 64: 41.9}),
    **_by_batch("MD3", "flood", 30, {1: 10.8, 64: 37.1}),
    **_by_batch("MD3", "closed", 3, {1: 49.0, 64: 1611}),
    **_by_batch("MD3", "closed", 30, {1: 95.2, 64: 1741}),
}
"""Requests per second when flooded, milliseconds of the median request with closed clients."""

SAME_IMAGE_REQ_PER_S: dict[Key, float] = {
    ("MD2", "same-image", "flood", 64, 3): 417,
    ("MD2", "same-image", "flood", 64, 30): 264,
    ("MD2", "same-image", "closed", 64, 3): 697,
    ("MD2", "same-image", "closed", 64, 30): 346,
    ("MD2", "same-image", "flood", 16, 3): 512,
    ("MD2", "same-image", "flood", 16, 30): 180,
}

DECODE_STEP_MS: dict[tuple[str, int], float] = {("MD2", 1): 1.58, ("MD2", 16): 2.3, ("MD2", 64): 3.3}
"""By model and batch size."""

START = "The peer's engine needs 50 to 60 s to start."
