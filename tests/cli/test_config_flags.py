"""Flags follow the dataclass: same fields, same defaults, no second place to change."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import typer

from kestrel.cli.app import GROUPS, SUBVERBS, VERBS, verb_command, verb_module
from kestrel.cli.config_flags import flag_parameters, takes_config, with_flags
from kestrel.config import RuntimeConfig, environment_names, flag_names
from kestrel.server.config import ServerConfig

from .conftest import MD3, Kestrel

FIELDS = {field.name: field for field in fields(RuntimeConfig)}


def parsed_config(*arguments: str) -> RuntimeConfig:
    """The configuration a verb gets for some flags."""
    seen: list[RuntimeConfig] = []

    @with_flags
    def verb(*, config: RuntimeConfig) -> None:
        seen.append(config)

    app = typer.Typer()
    app.command()(verb)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return seen[0]


def test_every_field_has_a_flag_with_the_same_default() -> None:
    parameters = {parameter.name: parameter for parameter in flag_parameters(RuntimeConfig)}
    for name, field in FIELDS.items():
        if name == "weights_path":
            assert "--weights" in flag_names(FIELDS["model_path"])
            continue
        assert parameters[name].default == field.default
        assert flag_names(field)


def test_every_verb_that_loads_a_model_takes_every_field() -> None:
    verbs = [getattr(verb_module(name), name) for name in VERBS]
    loading = [verb for verb in verbs if takes_config(verb)]
    assert {verb.__name__ for verb in loading} == {
        "query",
        "batch",
        "mcp",
        "chat",
        "complete",
        "caption",
        "point",
        "detect",
        "eval",
        "label",
        "segment",
        "profile",
        "schedule",
        "serve",
    }
    for verb in loading:
        assert FIELDS.keys() - {"weights_path"} <= inspect.signature(verb).parameters.keys()


def test_no_flags_give_the_default_configuration() -> None:
    assert parsed_config() == RuntimeConfig()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (("--weights", "here"), "model_path", "here"),
        (("--model-path", "here"), "model_path", "here"),
        (("--dtype", "bf16"), "dtype", "bf16"),
        (("--max-batch-size", "3"), "max_batch_size", 3),
        (("--priority-ageing-s", "0.5"), "priority_ageing_s", 0.5),
        (("--no-enable-prefix-cache",), "enable_prefix_cache", False),
        (("--no-enable-prefix-cache", "--enable-prefix-cache"), "enable_prefix_cache", True),
    ],
)
def test_a_flag_sets_its_field_and_nothing_else(arguments: tuple[str, ...], field: str, value: Any) -> None:
    assert parsed_config(*arguments) == RuntimeConfig(**{field: value})


def test_environment_variables_set_fields_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTREL_PAGE_SIZE", "8")
    monkeypatch.setenv("KESTREL_ENABLE_PREFIX_CACHE", "false")
    monkeypatch.setenv("KESTREL_WEIGHTS", "there")
    config = parsed_config("--page-size", "4")
    assert (config.page_size, config.enable_prefix_cache, config.model_path) == (4, False, "there")
    assert parsed_config().page_size == 8


def test_environment_names_are_the_flags_and_the_field_in_capitals() -> None:
    assert environment_names(FIELDS["model_path"]) == ["KESTREL_MODEL_PATH", "KESTREL_WEIGHTS"]
    assert environment_names(FIELDS["max_seq_length"]) == ["KESTREL_MAX_SEQ_LENGTH"]
    (hosts,) = [field for field in fields(ServerConfig) if field.name == "allowed_hosts"]
    assert environment_names(hosts) == ["KESTREL_ALLOWED_HOST", "KESTREL_ALLOWED_HOSTS"]
    assert environment_names(FIELDS["weights_path"]) == []


def test_help_shows_the_words_and_default_of_each_field(kestrel: Kestrel) -> None:
    printed = " ".join(kestrel("query", "--help-all").out.split())
    for name, field in FIELDS.items():
        if name == "weights_path":
            continue
        assert all(flag in printed for flag in flag_names(field))
        assert field.metadata["help"].split(".")[0][:20] in printed
    assert "[default: 1024]" in printed


@pytest.mark.parametrize("verb", ["query", "detect", "chat", "label", "serve", "batch", "eval", "train adapter"])
def test_help_shows_the_flags_that_people_use_and_names_the_page_with_all(kestrel: Kestrel, verb: str) -> None:
    short, whole = (kestrel(*verb.split(), page).out for page in ("--help", "--help-all"))
    flags, all_flags = (set(re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)) for page in (short, whole))
    assert {"--model", "--model-path", "--device"} < flags < all_flags
    assert short.splitlines()[-1] == f"{len(all_flags - flags)} more flags: kestrel {verb} --help-all"
    assert "more flags" not in whole
    titles = [re.findall(r"^(\w.*):$", page, re.MULTILINE) for page in (short, whole)]
    assert len(titles[0]) >= 2
    assert set(titles[0]) < set(titles[1])


@pytest.mark.parametrize("verb", [*VERBS, *(f"{verb} {name}" for verb in SUBVERBS for name in SUBVERBS[verb]), *GROUPS])
def test_help_of_no_verb_shows_more_than_ten_flags(verb: str) -> None:
    command = verb_command(*verb.split())
    for each in command.commands.values() if verb in GROUPS else [command]:
        rare = getattr(each.callback, "rare_flags", ())
        flags = [one for one in each.params if one.param_type_name == "option" and not one.hidden]
        assert len([one.name for one in flags if one.name not in ("help_all", *rare)]) <= 10


def test_an_impossible_value_names_its_field(kestrel: Kestrel) -> None:
    outcome = kestrel("query", "hi", *MD3, "--page-size", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: --page-size: must be an integer from 1 to 1024 (got 0)")
