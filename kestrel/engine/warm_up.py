"""One real request per skill, and the vocabulary for answer formats, before a server calls itself ready."""

from __future__ import annotations

import time

import numpy as np

from kestrel.engine.api import InferenceEngine

TENANT = "warm-up"
"""Its cached KV is shared with nobody."""
FIELDS = {
    "query": {"question": "What is this?", "reasoning": False, "max_tokens": 2},
    "caption": {"max_tokens": 2},
    "point": {"object": "thing", "max_objects": 1},
    "detect": {"object": "thing", "max_objects": 1},
    "segment": {"object": "thing", "max_tokens": 8},
}


async def warm_up(engine: InferenceEngine) -> float:
    """Run every skill that the model knows; the seconds it took."""
    began_s = time.monotonic()
    await engine.prepare_formats()
    known = {name.split(".")[0] for name in engine.profile.templates}
    picture = _picture() if engine.profile.has_vision else None
    for skill, fields in FIELDS.items():
        if skill in known and skill in engine.skills:
            await engine.run(skill, image=picture, tenant=TENANT, **fields)
    return time.monotonic() - began_s


def _picture() -> np.ndarray:
    """Small enough for one crop: more of them are the same work again, and a server should be back soon."""
    rows, columns = np.mgrid[0:300, 0:400]
    return np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8)
