"""Through the public engine: the same answers, points and boxes as the published reference."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.conftest import GOLDENS, MakeEngine, ask, assert_same_output, cases
from tests.exhaustive import sweep


def plain(family: str) -> list[str]:
    """Cases that need neither changed ids, nor extra weights, nor forced tokens."""
    special = ("lora", "tokenizer_overrides", "forced_tokens")
    return [n for n, c in cases(family).items() if not any(k in c for k in special) and not c.get("region_layernorm")]


@sweep("family", ["md2", "md3"], always=["md3"])
async def test_every_case_alone_and_all_at_once(family: str, make_engine: MakeEngine) -> None:
    engine = await make_engine(family, max_batch_size=16)
    golden = cases(family)
    for name in plain(family):
        result = await ask(engine, golden[name])
        assert_same_output(result.output, golden[name]["output"])
    together = await asyncio.gather(*(ask(engine, golden[name]) for name in plain(family)))
    for name, result in zip(plain(family), together, strict=True):
        assert_same_output(result.output, golden[name]["output"])
        if golden[name]["image"] is not None:
            assert result.metrics.cached_tokens >= 730, name


@pytest.mark.parametrize("name", [n for n, c in cases("md2").items() if "tokenizer_overrides" in c])
async def test_cases_with_other_special_ids(name: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    case = cases("md2")[name]
    folder = copy_folder("md2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["tokenizer"] |= case["tokenizer_overrides"]
    (folder / "config.json").write_text(json.dumps(config))
    if "eos_id" in case["tokenizer_overrides"]:
        mark_special(folder, case["tokenizer_overrides"]["eos_id"])
    engine = await make_engine("md2", model_path=folder)
    result = await ask(engine, case)
    assert_same_output(result.output, case["output"])


async def test_cases_with_a_region_layernorm(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Without those of forced tokens, which are checked on the model and on the skill's state."""
    folder = copy_folder("md3", tmp_path)
    weights = load_file(folder / "model.safetensors") | load_file(GOLDENS / "md3" / "region_ln.safetensors")
    save_file(weights, folder / "model.safetensors")
    engine = await make_engine("md3", model_path=folder)
    chosen = [case for case in cases("md3").values() if case.get("region_layernorm") and "forced_tokens" not in case]
    assert chosen
    for case in chosen:
        assert_same_output((await ask(engine, case)).output, case["output"])


def copy_folder(family: str, target: Path) -> Path:
    folder = target / family
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(GOLDENS / family / name, folder / name)
    return folder


def mark_special(folder: Path, token_id: int) -> None:
    """The loader wants the end of text to be a special token of the tokenizer."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    content = next(text for text, i in data["model"]["vocab"].items() if i == token_id)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"].append({"id": token_id, "content": content, **flags})
    data["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(data))
