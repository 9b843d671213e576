"""Names for published text models. Without torch."""

from __future__ import annotations

from kestrel.models.published import ShortName

FAMILY = "llama"
RANDOM_NAMES = ("L1B", "L8B", "Ltiny")
"""Models that can be made with random weights."""
_APACHE = "Apache-2.0"
SHORT_NAMES = (
    ShortName("smollm2-135m", FAMILY, "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, _APACHE,
              "SmolLM2 135M Instruct: for trials on any machine."),
    ShortName("smollm2-360m", FAMILY, "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, _APACHE,
              "SmolLM2 360M Instruct: short answers in English."),
    ShortName("smollm2-1.7b", FAMILY, "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, _APACHE,
              "SmolLM2 1.7B Instruct: the largest of its kind."),
    ShortName("qwen2.5-0.5b", FAMILY, "Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, _APACHE,
              "Qwen2.5 0.5B Instruct: many languages, calls tools."),
    ShortName("qwen3-0.6b", FAMILY, "Qwen/Qwen3-0.6B", 596_049_920, _APACHE,
              "Qwen3 0.6B: thinks first, many languages, calls tools."),
    ShortName("qwen3-4b", FAMILY, "Qwen/Qwen3-4B", 4_022_468_096, _APACHE,
              "Qwen3 4B: thinks first, many languages, calls tools."),
    ShortName("llama-3.2-1b", FAMILY, "meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, "Llama 3.2 Community License",
              "Llama 3.2 1B Instruct: 128k context, calls tools. Gated: ask for access on its page."),
    ShortName("mistral-7b", FAMILY, "mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, _APACHE,
              "Mistral 7B Instruct v0.3: 32k context, calls tools."),
)  # fmt: skip
