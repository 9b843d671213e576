"""Config and tokenizer beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel.errors import CheckpointError
from kestrel.models.locate import find_tokenizer, read_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": {"dim": 1}, "vision": {}}', {"text": {"dim": 1}, "vision": {}}),
        ('{"model_type": "moondream1", "config": {}}', None),
        ('{"model_type": "moondream1"}', None),
        ('{"model_type": "moondream1", "config": {"text": {"dim": 1}}}', {"text": {"dim": 1}}),
    ],
)
def test_a_config_counts_only_when_it_gives_dimensions(
    tmp_path: Path, text: str, expected: dict[str, object] | None
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) == expected


def test_no_config_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_config(tmp_path)


def test_a_given_tokenizer_wins_over_the_one_beside_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="put it beside the weights, or pass tokenizer_path"):
        find_tokenizer(weights, None)
    with pytest.raises(CheckpointError, match=r"other\.json does not exist; check tokenizer_path"):
        find_tokenizer(weights, tmp_path / "other.json")
    for name in ("tokenizer.json", "other.json"):
        (tmp_path / name).write_text("{}")
    assert find_tokenizer(weights, None).name == "tokenizer.json"
    assert find_tokenizer(weights, tmp_path / "other.json").name == "other.json"
