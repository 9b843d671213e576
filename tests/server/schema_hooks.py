"""Loaded by schemathesis: two bodies of three show a real picture, so that the requests get past it.

The picture comes by the environment: our own modules would bring torch along.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("image_url"), str) and len(body["image_url"]) % 3 != 1:
        body["image_url"] = os.environ["TEST_PICTURE"]
    return body
