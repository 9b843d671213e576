"""From a configuration to a model: names, folders, single files, published folders and their traps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kestrel import families, known_models
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError
from kestrel.models import hub
from kestrel.models.checkpoint_files import TensorInfo, write_safetensors
from kestrel.models.hub import HubFile
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.spec import LoadedMoondream
from kestrel.moondream.weights import build_on_meta

GOLDENS = Path(__file__).parent / "goldens"
PUBLISHED_CONFIG = {"model_type": "moondream1", "config": {}, "torch_dtype": "bfloat16"}


def load(located: families.LocatedModel) -> LoadedMoondream:
    loaded = families.load(located, "cpu", torch.float32)
    assert isinstance(loaded, LoadedMoondream)
    return loaded


@pytest.fixture
def golden_folder(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a golden model's own three files."""

    def copy(family: str, *names: str) -> Path:
        folder = tmp_path / f"my-{family}"
        folder.mkdir()
        for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
            shutil.copy(GOLDENS / family / name, folder / name)
        return folder

    return copy


def hollow_weights(folder: Path, name: str) -> Path:
    """A file with the headers of a real model and a sparse hole where the data would be."""
    config = MoondreamConfig.from_dict(known_models.find_model(name).config)
    shapes = {f"model.{key}": p.shape for key, p in build_on_meta(config).named_parameters()}
    infos = {key: TensorInfo(tuple(shape), torch.bfloat16) for key, shape in shapes.items()}
    path = folder / "model.safetensors"
    with pytest.raises(ValueError, match="fewer tensors"):
        write_safetensors(path, infos, [])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + sum(info.num_bytes for info in infos.values()))
    return path


def test_every_registered_model_has_the_size_it_says() -> None:
    for spec in known_models.registered_models():
        model = build_on_meta(MoondreamConfig.from_dict(spec.config))
        assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters
        assert spec.licence
        assert spec.description


def test_all_that_can_be_fetched_have_the_starmie_tokenizer() -> None:
    """The one beside the weights of Moondream 2 is stale."""
    sources = [spec.source for spec in known_models.registered_models() if spec.source is not None]
    assert {source.tokenizer.repo for source in sources} == {"moondream/starmie-v1"}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model: 'moondream9' is not .*moondream2, moondream-0\.5b, ") as caught:
        families.resolve(RuntimeConfig(model="moondream9"))
    assert caught.value.field == "model"


@pytest.mark.parametrize("name", [None, "kestrel-tiny"])
def test_without_a_path_the_embedded_model_is_taken(name: str | None) -> None:
    located = families.resolve(RuntimeConfig(model=name))
    assert located.name == "kestrel-tiny"
    assert load(located).config.tokenizer.templates.keys() >= {"query", "caption.long", "point", "detect", "segment"}


def test_the_embedded_model_is_listed_first_with_the_size_it_has() -> None:
    spec, *others = known_models.known_models()
    assert tuple(others) == known_models.registered_models()
    model = load(families.resolve(RuntimeConfig(model=spec.name))).model
    assert (spec.name, spec.source) == ("kestrel-tiny", None)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert known_models.find_model("kestrel-tiny") == spec


def test_the_embedded_model_can_be_named_together_with_a_folder_of_its_shape(
    golden_folder: Callable[..., Path],
) -> None:
    located = families.resolve(RuntimeConfig(model="kestrel-tiny", model_path=families.default_model.FOLDER))
    assert located.name == "kestrel-tiny"
    with pytest.raises(CheckpointError, match=r"does not describe kestrel-tiny: text\.dim is 128"):
        families.resolve(RuntimeConfig(model="kestrel-tiny", model_path=golden_folder("md3")))


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_a_folder_needs_nothing_else_and_is_called_by_its_name(golden_folder: Callable[..., Path], family: str) -> None:
    located = families.resolve(RuntimeConfig(model_path=golden_folder(family)))
    assert (located.name, located.family) == (f"my-{family}", "moondream")
    loaded = load(located)
    assert loaded.name == f"my-{family}"
    assert loaded.config == loaded.model.config
    assert loaded.config.text.tau_attn == (family == "md3")
    assert loaded.tokenizer.vocab_size == 319
    assert loaded.kv_scales == {}


def test_a_weights_file_inside_a_complete_folder_needs_nothing_else(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2")
    located = families.resolve(RuntimeConfig(weights_path=folder / "model.safetensors"))
    assert located == families.resolve(RuntimeConfig(model_path=folder))


def test_a_name_must_be_of_the_model_in_the_folder(golden_folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"does not describe moondream2: text\.dim is 128, not 2048; leave"):
        families.resolve(RuntimeConfig(model_path=golden_folder("md2"), model="moondream2"))


def test_a_name_that_fits_the_folder_labels_it(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2")
    (folder / "config.json").write_text(json.dumps(dict(known_models.find_model("moondream2").config)))
    located = families.resolve(RuntimeConfig(model_path=folder, model="moondream2"))
    assert located.name == "moondream2"
    assert located.config["text"]["dim"] == 2048


def test_a_lone_file_takes_config_from_the_name_and_a_given_tokenizer(tmp_path: Path) -> None:
    weights = hollow_weights(tmp_path, "moondream3-preview")
    tokenizer = GOLDENS / "md3" / "tokenizer.json"
    located = families.resolve(RuntimeConfig(model_path=weights, tokenizer_path=tokenizer, model="moondream3.1-9B-A2B"))
    assert located.name == "moondream3.1-9B-A2B"
    assert located.config == known_models.find_model("moondream3.1-9B-A2B").config
    assert (located.weights, located.tokenizer) == (weights, tokenizer)


def test_a_lone_file_without_tokenizer_says_what_to_pass(tmp_path: Path) -> None:
    weights = hollow_weights(tmp_path, "moondream2")
    with pytest.raises(CheckpointError, match="tokenizer_path"):
        families.resolve(RuntimeConfig(model_path=weights, model="moondream2"))


@pytest.mark.parametrize("name", ["moondream2", "moondream-0.5b", "moondream3-preview"])
def test_a_published_folder_is_recognised_by_its_weights(tmp_path: Path, name: str) -> None:
    hollow_weights(tmp_path, name)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    shutil.copy(GOLDENS / "md3" / "tokenizer.json", tmp_path)
    located = families.resolve(RuntimeConfig(model_path=tmp_path))
    assert located.name == name
    assert located.config == known_models.find_model(name).config


def test_a_published_folder_of_unknown_size_asks_for_the_name(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    with pytest.raises(CheckpointError, match=r"look like no registered model; pass model= \(one of moondream2"):
        families.resolve(RuntimeConfig(model_path=folder))


def test_weights_of_another_release_say_which_name_to_pass(tmp_path: Path) -> None:
    weights = hollow_weights(tmp_path, "moondream3-preview")
    tokenizer = GOLDENS / "md3" / "tokenizer.json"
    located = families.resolve(RuntimeConfig(model_path=weights, tokenizer_path=tokenizer, model="moondream2"))
    with pytest.raises(
        CheckpointError, match=r'(?s)missing.*unexpected.*look like moondream3-preview; pass model="moondream3-preview"'
    ):
        load(located)


def test_weights_that_contradict_their_config_json_say_what_to_change(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2", "config.json", "tokenizer.json")
    hollow_weights(folder, "moondream2")
    with pytest.raises(
        CheckpointError, match=r'look like moondream2; remove the config.json .*pass model="moondream2"'
    ):
        load(families.resolve(RuntimeConfig(model_path=folder)))


def test_the_stale_tokenizer_of_the_moondream2_repository_is_refused(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    located = families.resolve(RuntimeConfig(model_path=folder))
    with pytest.raises(CheckpointError, match=r"its id 0 is the text .*moondream/starmie-v1.*tokenizer_path"):
        load(located)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    extra = {**tokenizer["added_tokens"][0], "special": False}
    tokenizer["added_tokens"] += [{**extra, "id": i, "content": f"word{i}"} for i in (319, 320)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="has 321 ids, the model only 320"):
        load(families.resolve(RuntimeConfig(model_path=folder)))


def test_a_config_of_no_known_family_is_refused(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md2")
    (folder / "config.json").write_text('{"text": {"dim": 4}}')
    with pytest.raises(CheckpointError, match=r"config\.json describes no known family"):
        families.resolve(RuntimeConfig(model_path=folder))


def test_kv_scales_reach_the_caller(golden_folder: Callable[..., Path]) -> None:
    folder = golden_folder("md3")
    scales = {f"text_model.transformer.h.0.kv_quantizer.{kind}_scale": torch.full((1,), 0.5) for kind in "kv"}
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    loaded = load(families.resolve(RuntimeConfig(model_path=folder)))
    assert {layer: (scale.k, scale.v) for layer, scale in loaded.kv_scales.items()} == {0: (0.5, 0.5)}


def test_a_named_model_is_fetched_with_its_tokenizer(
    golden_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = golden_folder("md2")
    asked: list[HubFile] = []

    def fetch(file: HubFile) -> Path:
        asked.append(file)
        return folder / file.name

    monkeypatch.setattr(hub, "fetch_weights", fetch)
    monkeypatch.setattr(hub, "fetch_file", fetch)
    located = families.resolve(RuntimeConfig(model="moondream2"))
    source = known_models.find_model("moondream2").source
    assert source is not None
    assert asked == [source.weights, source.tokenizer]
    assert located.config == known_models.find_model("moondream2").config
    assert (located.weights, located.tokenizer) == (folder / "model.safetensors", folder / "tokenizer.json")
    given = RuntimeConfig(model="moondream2", tokenizer_path=GOLDENS / "md3" / "tokenizer.json")
    assert families.resolve(given).tokenizer == GOLDENS / "md3" / "tokenizer.json"
    assert asked[2:] == [source.weights]


def test_a_model_without_public_torch_weights_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"moondream-0\.5b cannot be fetched.*ONNX.*--model-path"):
        families.resolve(RuntimeConfig(model="moondream-0.5b"))
