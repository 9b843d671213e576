"""Runtime configuration: frozen, inert data. Nothing is downloaded, probed or opened here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kestrel.config_checks import check_device, check_numbers, check_revision, check_url_template
from kestrel.errors import ConfigError, shown

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
QUANTIZATIONS = ("none", "fp8", "fp8-experts")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa", "flashinfer")


def _doc(text: str, **extra: Any) -> dict[str, Any]:
    return {"help": text, **extra}


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How one engine runs one model. Every field is also a CLI flag."""

    model: str | None = field(
        default=None, metadata=_doc("Registered model name; fetched from the hub unless model_path is given.")
    )
    revision: str | None = field(
        default=None,
        metadata=_doc(
            "Commit, tag or branch of the named model's weights on the hub. Default: the commit that `kestrel models` "
            "shows."
        ),
    )
    model_path: str | os.PathLike[str] | None = field(
        default=None, metadata=_doc("A model folder, or a single weights file.", flags=("--model-path", "--weights"))
    )
    weights_path: str | os.PathLike[str] | None = field(
        default=None, metadata=_doc("Another name for model_path.", flags=())
    )
    tokenizer_path: str | os.PathLike[str] | None = field(
        default=None, metadata=_doc("tokenizer.json to use with a single weights file.")
    )
    device: str = field(default="auto", metadata=_doc("auto, cpu, cuda or cuda:N. auto takes a GPU when there is one."))
    dtype: Any = field(
        default="auto", metadata=_doc("auto, float32, bfloat16 or float16. auto: bfloat16 on a GPU, float32 on a CPU.")
    )
    quantization: str = field(
        default="none",
        metadata=_doc(
            "none, fp8 (matrices of vision, dense text blocks and experts in float8) or fp8-experts (experts alone). "
            "float8 needs a GPU of compute capability 8.9."
        ),
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata=_doc("Numbers of the KV cache: auto (the model's dtype), bf16, or fp8 (half the memory; GPU only)."),
    )
    attention_backend: str = field(
        default="auto",
        metadata=_doc(
            "auto, triton or sdpa. auto: Triton kernels on a GPU that can run them, else torch's own attention (sdpa), "
            "which runs without fused operations and CUDA graphs. flashinfer is not available yet."
        ),
    )
    max_batch_size: int = field(default=16, metadata=_doc("Sequences that run at the same time."))
    max_seq_length: int | None = field(
        default=None, metadata=_doc("Longest prompt plus answer in tokens. Default: the model's own context.")
    )
    page_size: int = field(default=16, metadata=_doc("Positions per KV cache page."))
    kv_cache_pages: int | None = field(
        default=None, metadata=_doc("Pages in the KV cache. Default: planned from free memory.")
    )
    kv_cache_memory_fraction: float | None = field(
        default=None,
        metadata=_doc(
            "Share of the memory left by weights and steps that a planned KV cache may take. Default: 0.8 on a GPU, "
            "0.25 on a CPU."
        ),
    )
    refiner_path: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_doc("Weights of the segmentation refiner; without them segment returns the model's own outline."),
    )
    adapter_dir: str | os.PathLike[str] | None = field(
        default=None, metadata=_doc("A folder of adapters; files may come, change and go while the engine runs.")
    )
    adapter_url_template: str | None = field(
        default=None,
        metadata=_doc("Where to download adapters from, such as https://example.org/adapters/{id}.safetensors."),
    )
    adapter_cache_dir: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_doc("Where downloaded adapters are kept. Default: kestrel/adapters in the user's cache folder."),
    )
    adapter_cache_bytes: int = field(
        default=20 * 2**30,
        metadata=_doc(
            "Downloaded adapters kept on disk, in bytes, those being downloaded included; the least recently used make "
            "way."
        ),
    )
    max_adapters: int = field(default=4, metadata=_doc("Adapters that are on the device at the same time."))
    max_adapter_rank: int = field(default=64, metadata=_doc("Largest rank of an adapter; its memory is set aside."))
    adapter_memory_bytes: int = field(
        default=2 * 2**30, metadata=_doc("Loaded adapters kept in the memory of the host, in bytes.")
    )
    enable_prefix_cache: bool = field(
        default=True, metadata=_doc("Reuse the KV of repeated images, prompts and earlier answers.")
    )
    max_prefill_tokens: int | None = field(
        default=None,
        metadata=_doc(
            "Prompt positions one step may hold, so that running streams keep moving. Default: 2048, and 4096 on a GPU "
            "with 16 rows or more."
        ),
    )
    streaming_prefill_tokens: int | None = field(
        default=None,
        metadata=_doc(
            "Prompt positions one step may hold while an answer is streamed; pictures are then encoded in slices, so "
            "that tokens come evenly, and on a CPU at all times. 0: whole pictures, and no other pace than "
            "max_prefill_tokens. Default: 768 on a GPU, 256 on a CPU."
        ),
    )
    vision_batch_crops: int | None = field(
        default=None,
        metadata=_doc(
            "Crops of pictures that are encoded together. Default: 72 on a GPU, fewer on one with little memory, 16 on "
            "a CPU."
        ),
    )
    max_queue_size: int = field(
        default=1024, metadata=_doc("Requests beyond `max_batch_size` before new ones are refused.")
    )
    max_queue_tokens: int | None = field(
        default=None, metadata=_doc("Prompt tokens of waiting requests before new ones are refused. Default: no limit.")
    )
    priority_ageing_s: float = field(
        default=5.0, metadata=_doc("Seconds of waiting that weigh as much as one priority level.")
    )
    enable_cuda_graphs: bool = field(
        default=True,
        metadata=_doc("Capture steps as CUDA graphs, the usual ones at the start; without effect on a CPU."),
    )
    compile: bool = field(
        default=False, metadata=_doc("Compile the model with torch.compile (not available yet: refused when set).")
    )
    honour_exif_orientation: bool = field(
        default=True,
        metadata=_doc("Turn pictures upright by their EXIF tag. The reference implementation ignores the tag."),
    )
    max_image_pixels: int = field(
        default=100_000_000, metadata=_doc("Largest picture in pixels, read from its header before decoding.")
    )
    max_image_bytes: int = field(default=64 * 2**20, metadata=_doc("Largest encoded picture in bytes."))
    max_pending_image_bytes: int = field(
        default=4 * 2**30,
        metadata=_doc("Pictures of unanswered requests, in bytes as they are kept, before new ones are refused."),
    )
    image_work_bytes: int = field(
        default=2 * 2**30,
        metadata=_doc(
            "Memory for decoding and resizing pictures, in bytes, reckoned from their headers: a picture waits until "
            "there is room for it."
        ),
    )
    recent_image_bytes: int = field(
        default=64 * 2**20,
        metadata=_doc("Memory for decoded picture files, in bytes, so that a file sent again is not decoded again."),
    )
    image_threads: int | None = field(
        default=None,
        metadata=_doc(
            "Threads that decode pictures; those above 16.8 megapixels have a few of their own. Default: half as many "
            "as cores, from 2 to 8."
        ),
    )

    def __post_init__(self) -> None:
        _check_sources(self)
        check_url_template(self.adapter_url_template)
        check_numbers(self)
        check_device(self.device)
        normalise_dtype(self.dtype)
        _check_choices(self)
        _check_quantization(self)
        if self.compile:
            raise ConfigError("compile", "torch.compile is not available in this version; leave it out")

    @property
    def weights(self) -> Path | None:
        """The local model folder or weights file, if one was given."""
        source = self.model_path if self.model_path is not None else self.weights_path
        return None if source is None else _expanded(source)

    @property
    def dtype_name(self) -> str:
        return normalise_dtype(self.dtype)

    @property
    def kv_cache_dtype_name(self) -> str:
        """ "auto", "bfloat16" or "fp8"."""
        return DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def refiner_file(self) -> Path | None:
        return None if self.refiner_path is None else _expanded(self.refiner_path)

    @property
    def adapter_folder(self) -> Path | None:
        return None if self.adapter_dir is None else _expanded(self.adapter_dir)

    @property
    def adapter_cache_folder(self) -> Path | None:
        return None if self.adapter_cache_dir is None else _expanded(self.adapter_cache_dir)

    @property
    def tokenizer_file(self) -> Path | None:
        return None if self.tokenizer_path is None else _expanded(self.tokenizer_path)


def _expanded(path: str | os.PathLike[str]) -> Path:
    """`~` is the home folder where there is one; unlike Path.expanduser, an unknown user is no error here."""
    return Path(os.path.expanduser(path))


def normalise_dtype(value: Any) -> str:
    """ "bfloat16" from "bf16", "torch.bfloat16" or the torch dtype itself."""
    name = str(value).removeprefix("torch.").lower()
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError("dtype", f"{shown(value)} is not supported; use one of: {', '.join(DTYPES)}")
    return name


def _check_choices(config: RuntimeConfig) -> None:
    for name, known in (
        ("quantization", QUANTIZATIONS),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("attention_backend", ATTENTION_BACKENDS),
    ):
        value = getattr(config, name)
        if not isinstance(value, str) or value not in known:
            raise ConfigError(name, f"{shown(value)} is not supported; use one of: {', '.join(known)}")
    if config.attention_backend == "flashinfer":
        raise ConfigError("attention_backend", "flashinfer is not available in this version; use auto")


def _check_quantization(config: RuntimeConfig) -> None:
    if config.quantization != "none" and config.attention_backend == "sdpa":
        raise ConfigError(
            "quantization",
            f"{config.quantization!r} runs on Triton kernels, which attention_backend='sdpa' forbids; "
            "leave one of the two out",
        )


def _check_sources(config: RuntimeConfig) -> None:
    if config.model_path is not None and config.weights_path is not None:
        raise ConfigError("weights_path", "is another name for model_path; give only one of them")
    for name in ("model_path", "weights_path", "tokenizer_path", "refiner_path", "adapter_dir", "adapter_cache_dir"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ConfigError(name, f"must be a path (got {shown(value)})")
    check_revision(config.revision)
    if config.revision is not None and config.weights is not None:
        raise ConfigError("revision", "is for models of the hub, and model_path names files; leave one of the two out")
    if config.model is not None and (not isinstance(config.model, str) or not config.model.strip()):
        raise ConfigError("model", f"must be a registered model name (got {shown(config.model)}); see `kestrel models`")
