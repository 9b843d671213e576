"""kestrel adapters: lists, the inside of files, and files in our own form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kestrel import families, known_models
from kestrel.adapters import Adapter, AdapterTarget, LowRankPair, load_adapter, save_adapter
from kestrel.adapters.sources.disk_cache import AdapterDiskCache
from kestrel.moondream.config import MOONDREAM2
from kestrel.moondream.decoder import adapter_shape
from tests.adapters.adapter_files import HOSTED, MD2, MD3, VARIANT
from tests.adapters.peft_files import LLAMA, write_peft
from tests.llama.tiny_folders import write_folder
from tests.models.loopback_hub import running_hub

from .conftest import GOLDENS, Kestrel


def made_for_moondream2(path: Path) -> Adapter:
    torch.manual_seed(0)
    pair = LowRankPair(torch.randn(8, 2048), torch.randn(6144, 8))
    adapter = Adapter(
        "kestrel-adapter", 8, {AdapterTarget(0, "qkv"): pair}, alpha=16.0, metadata={"made": "\x1b[31mhere"}
    )
    save_adapter(adapter, path)
    return adapter


@pytest.mark.parametrize(
    ("file", "model", "kind", "rank"), [(VARIANT, "md2", "torch-variant", 4), (HOSTED, "md3", "hosted-finetune", 6)]
)
def test_the_goldens_are_described(kestrel: Kestrel, file: Path, model: str, kind: str, rank: int) -> None:
    told = kestrel("adapters", "inspect", file, "--model-path", GOLDENS / model, "--json")
    assert (told.code, told.err) == (0, "")
    found = json.loads(told.out)
    assert (found["format"], found["rank"], found["fits"]) == (kind, rank, [model])
    assert found["num_values"] == sum(tensor.numel() for tensor in load_file(file).values())


def test_the_strength_of_deltas_is_that_of_the_whole_matrices(kestrel: Kestrel, tmp_path: Path) -> None:
    adapter = made_for_moondream2(tmp_path / "mine.safetensors")
    pair = adapter.targets[AdapterTarget(0, "qkv")]
    expected = float(torch.linalg.matrix_norm(2.0 * pair.b.double() @ pair.a.double()))
    found = json.loads(kestrel("adapters", "inspect", tmp_path / "mine.safetensors", "--json").out)
    assert found["delta_norms"] == {"qkv": pytest.approx(expected, rel=1e-9)}
    experts = json.loads(kestrel("adapters", "inspect", HOSTED, "--json").out)["delta_norms"]
    deltas = [
        pair.b.double() @ pair.a.double() for t, pair in load_adapter(HOSTED, MD3).targets.items() if t.matrix == "fc2"
    ]
    assert experts["fc2"] == pytest.approx(sum(float(delta.square().sum()) for delta in deltas) ** 0.5, rel=1e-9)


def test_the_page_for_people_names_the_models_and_cannot_steer_the_terminal(kestrel: Kestrel, tmp_path: Path) -> None:
    made_for_moondream2(tmp_path / "mine.safetensors")
    told = kestrel("adapters", "inspect", tmp_path / "mine.safetensors")
    words = " ".join(told.out.split())
    assert "8, alpha 16" in words
    assert "moondream2, moondream3-preview" in words  # their attention has the same size
    assert "kestrel-tiny" not in words
    assert "\x1b" not in told.out


def test_what_fits_nothing_says_why_when_one_model_is_named(kestrel: Kestrel) -> None:
    told = kestrel("adapters", "inspect", VARIANT)
    assert (told.code, "none of kestrel-tiny" in told.out) == (0, True)
    told = kestrel("adapters", "inspect", VARIANT, "--model", "moondream2")
    assert "missing tensors" in told.out


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_converted_file_holds_the_same_adapter_and_names_its_base(
    kestrel: Kestrel, tmp_path: Path, suffix: str
) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / "out.safetensors"
    tensors = load_file(VARIANT)
    if suffix == ".pt":
        torch.save(tensors, source)
    else:
        save_file(tensors, source)
    told = kestrel("adapters", "convert", source, target, "--model-path", GOLDENS / "md2")
    assert told.code == 0
    before, after = load_adapter(VARIANT, MD2), load_adapter(target, MD2)
    assert (after.format, after.base_model) == ("kestrel-adapter", "md2")
    assert (after.rank, after.proj_input) == (before.rank, before.proj_input)
    for place, pair in before.targets.items():
        assert torch.equal(pair.a, after.targets[place].a)
        assert torch.equal(pair.b, after.targets[place].b)


def test_an_adapter_that_fits_several_models_gets_no_base_by_guessing(kestrel: Kestrel, tmp_path: Path) -> None:
    made_for_moondream2(tmp_path / "in.safetensors")
    told = kestrel("adapters", "convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert "give --model" in told.err
    assert load_adapter(tmp_path / "out.safetensors", adapter_shape(MOONDREAM2.text)).base_model is None
    kestrel(
        "adapters",
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--model",
        "moondream2",
        "--overwrite",
    )
    assert load_adapter(tmp_path / "out.safetensors", adapter_shape(MOONDREAM2.text)).base_model == "moondream2"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("inspect", "missing.pt"), 3, "there is no missing.pt"),
        (("inspect", GOLDENS / "md3" / "config.json"), 3, "supported suffixes"),
        (("inspect", GOLDENS / "md3" / "model.safetensors"), 3, "no known adapter format"),
        (("inspect", VARIANT, "--model", "unheard-of"), 2, "moondream2"),
        (("inspect", VARIANT, "--model-path", "/no/such/folder"), 3, "/no/such/folder"),
        (("convert", VARIANT, "out.pt"), 2, "must end in .safetensors"),
        (("convert", VARIANT, "/no/such/folder/out.safetensors"), 2, "not a folder"),
        (("convert", VARIANT, HOSTED), 2, "exists already"),
        (("convert", VARIANT, "new.safetensors"), 3, "fits none of kestrel-tiny"),
        (("convert", VARIANT, "new.safetensors", "--model", "moondream2"), 3, "does not fit"),
        (("list", "--adapter-dir", "/no/such/folder"), 2, "--adapter-dir: "),
    ],
)
def test_mistakes_end_in_one_line_and_a_fitting_code(
    kestrel: Kestrel, arguments: tuple[str, ...], code: int, message: str
) -> None:
    told = kestrel("adapters", *arguments)
    assert (told.code, told.out) == (code, "")
    assert message in told.err
    assert len(told.err.splitlines()) == 1


def test_a_file_made_for_another_model_is_not_renamed(kestrel: Kestrel, tmp_path: Path) -> None:
    save_adapter(replace(load_adapter(VARIANT, MD2), base_model="theirs"), tmp_path / "in.safetensors")
    told = kestrel(
        "adapters",
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--model-path",
        GOLDENS / "md2",
    )
    assert (told.code, "'theirs'" in told.err) == (3, True)
    assert not (tmp_path / "out.safetensors").exists()


def test_adapters_of_the_folder_and_of_the_cache_are_listed(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert "no adapters" in kestrel("adapters", "list").err
    folder, cache = tmp_path / "folder", AdapterDiskCache(tmp_path / "cache", "somewhere")
    folder.mkdir()
    (folder / "cats@5.pt").write_bytes(bytes(2048))
    (folder / "not an id.pt").write_bytes(b"")
    partial = cache.partial_file()
    partial.start(7)
    cache.keep("01J5@7", partial.path, partial.finish(b"content"), ".pt")
    partial.discard()
    told = kestrel("adapters", "list", "--adapter-dir", folder, "--adapter-cache-dir", tmp_path / "cache", "--json")
    found = {row["id"]: row for row in json.loads(told.out)}
    assert found.keys() == {"cats@5", "not an id", "01J5@7"}
    assert (found["cats@5"]["bytes"], found["cats@5"]["problem"]) == (2048, None)
    assert (found["01J5@7"]["source"], found["not an id"]["problem"] is not None) == ("downloaded", True)
    monkeypatch.setenv("KESTREL_ADAPTER_DIR", str(folder))
    assert "2.0 KiB" in kestrel("adapters", "list").out


def test_every_known_model_can_say_what_an_adapter_must_fit() -> None:
    shapes = {spec.name: families.adapter_shape(spec) for spec in known_models.known_models()}
    assert shapes["moondream2"].num_experts is None
    assert shapes["moondream3-preview"].num_experts == 64
    assert (shapes["moondream2"].num_layers, shapes["moondream2"].layers[0]["qkv"].rows) == (24, 6144)


def test_a_folder_of_peft_is_described_and_converted(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = write_folder(tmp_path / "base", "llama"), write_peft(tmp_path / "mine")
    told = kestrel("adapters", "inspect", folder, "--model-path", base, "--json")
    found = json.loads(told.out)
    assert (found["format"], found["rank"], found["alpha"], found["fits"]) == ("peft", 4, 8.0, ["base"])
    assert (found["matrices"], found["num_layers"]) == (["q", "v"], 3)
    assert found["metadata"]["base_model_name_or_path"] == "someone/tiny"
    told = kestrel("adapters", "convert", folder, tmp_path / "own.safetensors", "--model-path", base)
    assert (told.code, "rank 4, 6 matrices of base" in told.err) == (0, True)
    before, after = load_adapter(folder, LLAMA), load_adapter(tmp_path / "own.safetensors", LLAMA)
    assert (after.format, after.base_model, after.scale) == ("kestrel-adapter", "base", before.scale)
    with running_hub(tmp_path / "cache", monkeypatch) as hub:
        hub.published["someone/tiny"] = {"config.json": (base / "config.json").read_bytes()}
        told = kestrel("adapters", "inspect", folder, "--model", "someone/tiny", "--json")
        assert json.loads(told.out)["fits"] == ["someone/tiny"]
        assert hub.files_asked() == {"config.json"}
