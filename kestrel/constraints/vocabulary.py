"""The vocabulary as the compiler of formats sees it."""

from __future__ import annotations

import json
import secrets
from typing import Any

from kestrel.errors import RequestError


def without_control_names(tokenizer_json: str) -> str:
    """The same tokenizer with control tokens that no text can spell.

    Text that a format demands is tokenised by the compiler. Under its own name an end-of-text token would be taken for
    the text of that name, and a schema could end an answer early or bring other control ids into it.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"].get("vocab")
    if tokenizer["model"].get("type") != "BPE" or not isinstance(vocabulary, dict):
        raise RequestError("response_format", "needs a model with a byte-level BPE tokenizer; leave it out")
    names: dict[str, str] = {}
    for token in tokenizer["added_tokens"]:
        if token["special"]:
            names[token["content"]] = token["content"] = f"<|{secrets.token_hex(16)}|>"
    tokenizer["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocabulary.items()}
    return json.dumps(tokenizer)
