"""The library: from an id to a checked adapter, kept by bytes, refused by name, never with a path."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kestrel.adapters import Adapter, AdapterLibrary, AdapterShape, load_adapter, save_adapter
from kestrel.adapters import library as library_module
from kestrel.adapters.sources import FolderSource, SourceChain
from kestrel.adapters.sources.remote import UrlTemplateSource
from kestrel.errors import AdapterGone, AdapterNotFound, AdapterSourceError, AdapterUnusable, RequestError
from tests.adapters.adapter_files import HOSTED, MD2, MD3, VARIANT, variant_tensors
from tests.adapters.adapter_hosts import answer, host

NUM_BYTES = 18_432 * 2  # numbers in the golden variant, in bfloat16


def make_library(
    folder: Path, *, max_rank: int = 64, max_bytes: int = 10**9, base: tuple[str, ...] = ()
) -> AdapterLibrary:
    return AdapterLibrary(FolderSource(folder), MD2, base, max_rank=max_rank, max_bytes=max_bytes)


def put(folder: Path, name: str, **changes: object) -> Adapter:
    adapter = replace(load_adapter(VARIANT, MD2), **changes)
    save_adapter(adapter, folder / f"{name}.safetensors")
    return adapter


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that were loaded, in order."""
    seen: list[Path] = []
    monkeypatch.setattr(
        library_module, "load_adapter", lambda path, shape: (seen.append(path), load_adapter(path, shape))[1]
    )
    return seen


async def refusal(library: AdapterLibrary, name: str) -> str:
    with pytest.raises(AdapterUnusable) as caught:
        await library.get(name)
    message = str(caught.value)
    assert message.startswith(f"adapter '{name}': ")
    assert "/" not in message
    assert "\n" not in message
    return message


async def test_an_adapter_is_loaded_once_and_its_key_names_id_and_contents(tmp_path: Path, loads: list[Path]) -> None:
    expected = put(tmp_path, "cats")
    library = make_library(tmp_path)
    found = await asyncio.gather(*(library.get("cats") for _ in range(10)))
    assert len(loads) == 1
    assert all(loaded is found[0] for loaded in found)
    assert found[0].key.startswith("cats#")
    assert found[0].load_seconds > 0
    for target, pair in found[0].adapter.targets.items():
        assert torch.equal(pair.a, expected.targets[target].a)
    shutil.copy(tmp_path / "cats.safetensors", tmp_path / "copy.safetensors")
    assert (await library.get("copy")).key.removeprefix("copy") == found[0].key.removeprefix("cats")


async def test_a_changed_file_is_another_adapter_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    put(tmp_path, "cats")
    library = make_library(tmp_path)
    first = await library.get("cats")
    put(tmp_path, "cats", alpha=2.0)
    second = await library.get("cats")
    assert first.key != second.key
    assert (first.adapter.alpha, second.adapter.alpha) == (None, 2.0)
    assert [loaded.key for loaded in library.snapshot().kept] == [second.key]
    (tmp_path / "cats.safetensors").unlink()
    with pytest.raises(AdapterNotFound, match="'cats'"):
        await library.get("cats")


async def test_the_least_recently_used_make_way_when_the_bytes_run_out(tmp_path: Path, loads: list[Path]) -> None:
    for name in "abc":
        put(tmp_path, name, alpha=float(ord(name)))
    library = make_library(tmp_path, max_bytes=2 * NUM_BYTES)
    for name in "abac":
        await library.get(name)
    state = library.snapshot()
    assert [loaded.adapter_id for loaded in state.kept] == ["a", "c"]
    assert (state.kept_bytes, state.evictions_total, state.loads_total) == (2 * NUM_BYTES, 1, 3)
    assert state.load_seconds_total > 0
    await library.get("b")
    assert [path.stem for path in loads] == ["a", "b", "c", "b"]


async def test_an_adapter_above_the_bound_is_served_and_not_kept(tmp_path: Path) -> None:
    put(tmp_path, "cats")
    library = make_library(tmp_path, max_bytes=NUM_BYTES - 1)
    assert (await library.get("cats")).num_bytes == NUM_BYTES
    assert library.snapshot().kept == ()


async def test_rank_and_base_model_are_checked(tmp_path: Path) -> None:
    put(tmp_path, "cats", base_model="moondream2")
    assert "max_adapter_rank 3" in await refusal(make_library(tmp_path, max_rank=3), "cats")
    assert (await make_library(tmp_path, base=("somebody/moondream2",)).get("cats")).adapter.rank == 4
    message = await refusal(make_library(tmp_path, base=("tiny", "md3")), "cats")
    assert "made for the model 'moondream2', but tiny or md3 is served" in message


def cut(content: bytes) -> bytes:
    return content[:-7]


def flip_header(content: bytes) -> bytes:
    return content[:8] + b"?" + content[9:]


DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".safetensors", cut),
    (".safetensors", flip_header),
    (".safetensors", lambda content: b""),
    (".safetensors", lambda content: bytes(100)),
    (".pt", cut),
    (".pt", lambda content: b""),
    (".pt", lambda content: bytes(100)),
]


@pytest.mark.parametrize(("suffix", "damage"), DAMAGES)
async def test_damaged_files_are_refused_by_name_and_served_once_they_are_whole(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"cats{suffix}"
    if suffix == ".pt":
        torch.save(variant_tensors(), file)
    else:
        put(tmp_path, "cats")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    library = make_library(tmp_path)
    await refusal(library, "cats")
    assert library.snapshot().failures_total == 1
    file.write_bytes(whole)
    assert (await library.get("cats")).adapter.rank == 4


async def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experts.safetensors").write_bytes(HOSTED.read_bytes())
    assert "does not fit the base model" in await refusal(make_library(tmp_path), "experts")


async def test_a_refused_file_is_not_read_again_at_once(
    tmp_path: Path, loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cats.pt").write_bytes(b"nonsense")
    library = make_library(tmp_path)
    messages = {await refusal(library, "cats") for _ in range(3)}
    assert (len(messages), len(loads)) == (1, 1)
    monkeypatch.setattr(library_module, "REFUSED_FOR_S", 0.0)
    library = make_library(tmp_path)
    await refusal(library, "cats")
    await refusal(library, "cats")
    assert len(loads) == 3


async def test_a_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "cats")
    changes = [lambda: put(tmp_path, "cats", alpha=8.0)]

    def load_while_it_changes(path: Path, shape: object) -> Adapter:
        adapter = load_adapter(path, MD2)
        if changes:
            changes.pop()()
        return adapter

    monkeypatch.setattr(library_module, "load_adapter", load_while_it_changes)
    assert (await make_library(tmp_path).get("cats")).adapter.alpha == 8.0


@pytest.mark.parametrize("name", ["../cats", "", "a/b", "cats.safetensors"])
async def test_hostile_ids_never_reach_a_source(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="finetune_id@step"):
        await make_library(tmp_path).get(name)


async def test_sources_are_asked_in_order_and_the_list_shows_what_would_be_served(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        put(folder, "both", alpha=1.0 if folder is first else 2.0)
    put(second, "second")
    (second / "not an id.pt").write_bytes(b"")
    chain = SourceChain([FolderSource(first), FolderSource(second)])
    library = AdapterLibrary(chain, MD2, (), max_rank=64, max_bytes=10**9)
    assert (await library.get("both")).adapter.alpha == 1.0
    assert (await library.get("second")).adapter.rank == 4
    assert [listing.name for listing in await library.list()] == ["both", "second"]
    with pytest.raises(AdapterNotFound, match="not found in the adapter folder and the adapter folder"):
        await library.get("third")
    with pytest.raises(AdapterNotFound, match="check the id; did you mean 'second'"):
        await library.get("secnd")


async def test_without_sources_the_message_says_how_to_have_one() -> None:
    library = AdapterLibrary(SourceChain([]), MD2, (), max_rank=64, max_bytes=1)
    with pytest.raises(AdapterNotFound, match="adapter_dir"):
        await library.get("cats")


async def test_a_failing_source_ends_the_search_and_a_removed_adapter_does_not(tmp_path: Path) -> None:
    async with host() as first, host() as second:
        chain = SourceChain([UrlTemplateSource(server.url + "/{id}", tmp_path) for server in (first, second)])
        library = AdapterLibrary(chain, MD3, (), max_rank=64, max_bytes=10**9)
        second.answers["/cats"] = answer(200, HOSTED.read_bytes())
        first.answers["/cats"] = answer(500)
        with pytest.raises(AdapterSourceError):
            await library.get("cats")
        first.answers["/cats"] = first.answers["/dogs"] = answer(410)
        assert (await library.get("cats")).adapter.format == "hosted-finetune"
        with pytest.raises(AdapterGone):
            await library.get("dogs")
        await library.close()


async def test_what_lies_on_disk_is_served_though_an_earlier_source_fails(tmp_path: Path) -> None:
    put(tmp_path, "cats")
    async with host() as server:
        server.answers["/cats"] = answer(500)
        remote = UrlTemplateSource(server.url + "/{id}", tmp_path / "cache")
        library = AdapterLibrary(SourceChain([remote, FolderSource(tmp_path)]), MD2, (), max_rank=64, max_bytes=10**9)
        assert (await library.get("cats")).adapter.rank == 4
        assert server.requests == []
        await library.close()


async def test_an_adapter_that_makes_way_between_download_and_loading_is_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host() as server:
        server.answers["/cats"] = answer(200, HOSTED.read_bytes())

        def load_what_is_gone(path: Path, shape: AdapterShape) -> Adapter:
            monkeypatch.undo()
            shutil.rmtree(path.parent)
            return load_adapter(path, shape)

        monkeypatch.setattr(library_module, "load_adapter", load_what_is_gone)
        library = AdapterLibrary(UrlTemplateSource(server.url + "/{id}", tmp_path), MD3, (), max_rank=64, max_bytes=1)
        assert (await library.get("cats")).adapter.format == "hosted-finetune"
        assert server.count("/cats") == 2
        await library.close()


async def test_a_downloaded_adapter_is_loaded(tmp_path: Path) -> None:
    async with host() as server:
        server.answers["/ft%4012"] = answer(200, HOSTED.read_bytes())
        source = UrlTemplateSource(server.url + "/{id}", tmp_path)
        library = AdapterLibrary(source, MD3, (), max_rank=64, max_bytes=10**9)
        loaded = await asyncio.gather(*(library.get("ft@12") for _ in range(8)))
        await library.close()
    assert {adapter.key for adapter in loaded} == {loaded[0].key}
    assert loaded[0].adapter.format == "hosted-finetune"
    assert server.count("/ft%4012") == 1
