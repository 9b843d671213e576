"""The real engine over the fake runtime: thousands of requests a second, answers known by hand."""

from __future__ import annotations

import json
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.engine import InferenceEngine
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.decoder import adapter_shape
from kestrel.moondream.prompts import moondream_profile
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.fake import FakeRuntime
from tests.engine.conftest import GOLDENS


def fake_engine(runtime: FakeRuntime | None = None, **changes: Any) -> InferenceEngine:
    """Started on the running loop; shut it down."""
    ready = fake_ready(runtime or FakeRuntime(fake_limits(), vocab_size=320))
    return InferenceEngine.start(RuntimeConfig(**changes), ready)


def fake_ready(runtime: FakeRuntime) -> ReadyModel:
    described = json.loads((GOLDENS / "md3" / "config.json").read_text())
    described["tokenizer"]["templates"]["segment"] = {"prefix": [1, 313, 2], "suffix": [3]}
    config = MoondreamConfig.from_dict(described)
    tokenizer = TextTokenizer.from_file(GOLDENS / "md3" / "tokenizer.json")
    return ReadyModel(
        runtime=runtime,
        profile=moondream_profile(
            config, tokenizer, "fake", ConstraintCompiler(tokenizer.to_json, config.tokenizer.eos_id)
        ),
        vocab_size=320,
        num_image_positions=config.vision.num_patches,
        adapter_shape=adapter_shape(config.text),
    )


def fake_limits(**changes: int) -> RuntimeLimits:
    numbers = {
        "max_batch_size": 32,
        "max_seq_length": 1000,
        "num_pages": 2000,
        "page_size": 16,
        "max_prefill_tokens": 2048,
        "steps_in_flight": 1,
    }
    return RuntimeLimits(**(numbers | changes))
