"""The published models of the Moondream family, and where they are. Without torch."""

from __future__ import annotations

from kestrel.models.published import HubFile, HubSource, ModelSpec
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MOONDREAM_0_5B

FAMILY = "moondream"
RANDOM_NAMES = ("MD2", "MD3", "tiny")
"""Models that can be made with random weights."""

# The tokenizer.json inside vikhyatk/moondream2 belongs to releases before 2025-06 and does not fit later weights.
_STARMIE = HubFile("moondream/starmie-v1", "35192e10a54e36eabe0a7cc57a2c1aab371cafc5", "tokenizer.json")
_MOONDREAM2 = HubFile("vikhyatk/moondream2", "9a7d4024050840e001defacec2b00727e89149e6", "model.safetensors")
_MOONDREAM3_PREVIEW = HubFile(
    "moondream/moondream3-preview", "5112966d1a723413b1c9a1e8bea272b72e647b35", "model.safetensors.index.json"
)

MODELS = (
    ModelSpec(
        name="moondream2",
        family=FAMILY,
        description="Moondream 2, release 2025-06-21: 1.9B dense, answers, captions, points and boxes.",
        num_parameters=1_927_237_104,
        licence="Apache-2.0",
        config=MOONDREAM2.to_dict(),
        source=HubSource(_MOONDREAM2, _STARMIE),
        source_note="The commit of the tag 2025-06-21.",
    ),
    ModelSpec(
        name="moondream-0.5b",
        family=FAMILY,
        description="Moondream 0.5B: the small dense model for weak machines.",
        num_parameters=631_889_382,
        licence="Apache-2.0",
        config=MOONDREAM_0_5B.to_dict(),
        source=None,
        source_note=(
            "Only ONNX archives of it are known to be public (vikhyatk/moondream2, branch onnx); this engine needs "
            "torch weights and the GPT-2 tokenizer.json of that time. Pass them with --model-path and --tokenizer-path."
        ),
    ),
    ModelSpec(
        name="moondream3-preview",
        family=FAMILY,
        description="Moondream 3 preview: 9.3B mixture of experts, 2B active, reasoning and 32k context.",
        num_parameters=9_268_622_832,
        licence="BSL 1.1 (no third-party service)",
        config=MOONDREAM3.to_dict(),
        source=HubSource(_MOONDREAM3_PREVIEW, _STARMIE),
    ),
    ModelSpec(
        name="moondream3.1-9B-A2B",
        family=FAMILY,
        description="Moondream 3.1: 9.3B mixture of experts, 2B active, float8 experts on disk.",
        num_parameters=9_268_622_832,
        licence="Moondream Model License 1.0 (unverified; see the model page)",
        config=MOONDREAM3.to_dict(),
        source=HubSource(HubFile("moondream/moondream3.1-9B-A2B", None, "model.safetensors"), _STARMIE),
        source_note="No commit of its weights is known to this release: give one with --revision.",
    ),
)
