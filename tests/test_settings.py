"""Every surface takes the same values of every setting: Python, both HTTP APIs, the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from kestrel.cli.app import run
from kestrel.engine import InferenceEngine
from kestrel.errors import RequestError, shown
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.schemas import TINY_PICTURE
from kestrel.server.state import app_state
from kestrel.settings import (
    MAX_SEED,
    MAX_TOKENS,
    ROUTING,
    SETTINGS,
    SamplingParams,
    Schema,
    Setting,
    some_token_ids,
)
from tests.engine.fake_engine import fake_engine
from tests.scene import SCENE

ALL = {**SETTINGS, **ROUTING}
IDS = [str(token_id) for token_id in range(301)]
OTHER_EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "adapter": ([], ["", " "]),
    "allowed_ids": ([[5]], [[], [-1], [2**31], 5]),
    "suppressed_ids": ([[], [5]], [[-1], [2**31]]),
    "stop_token_ids": ([[], [*range(5, 69)]], [[*range(5, 70)], [-1]]),
    "logit_bias": (
        [{}, {"0000000005": -100, "6": 100}, dict.fromkeys(IDS[:300], 1)],
        [{"00000000005": 1}, {"5": 100.01}, {"-5": 1}, dict.fromkeys(IDS, 1)],
    ),
    "ignore_eos": ([True, False], [1, "true"]),
    "stop": ([["x" * 1000] * 4, [*"abcdefghijklmnop"], []], ["", "x" * 1001, [*"abcdefghijklmnopq"], [""]]),
    "request_id": (["r" * 256], ["", "r" * 257]),
    "cache_salt": (["s" * 256], ["", "s" * 257]),
}


def edges(setting: Setting) -> tuple[list[Any], list[Any]]:
    """Values at its bounds, and values just outside."""
    if "minimum" not in setting.kind.schema:
        return OTHER_EDGES[setting.name]
    low, high = setting.kind.schema["minimum"], setting.kind.schema["maximum"]
    if isinstance(low, int):
        return [low, high], [low - 1, high + 1]
    return [low, high], [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]


INSIDE = [(name, value) for name, setting in ALL.items() for value in edges(setting)[0]]
OUTSIDE = [(name, value) for name, setting in ALL.items() for value in edges(setting)[1]]


def names_of(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{name}-{str(value)[:20]}" for name, value in cases]


@pytest.mark.parametrize("wrong", [True, -1, 2**31, 2**32, 2**64, -(2**64), 1.5, "1", None, [1]])
def test_a_list_of_ids_names_the_first_entry_that_is_none(wrong: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"must hold token ids only; entry 1 is {shown(wrong)}")):
        some_token_ids("prompt", [2**31 - 1, wrong, -1])


def test_ids_with_a_point_are_taken_as_whole_numbers() -> None:
    assert some_token_ids("prompt", [0, 7.0, 2**31 - 1]) == (0, 7, 2**31 - 1)


@dataclass(frozen=True)
class Served:
    client: TestClient
    app: FastAPI

    @property
    def engine(self) -> InferenceEngine:
        return app_state(self.app).require_serving()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    async def factory() -> InferenceEngine:
        return fake_engine()

    app = create_app(factory, ServerConfig(urgent_api_keys=("key",)))
    with TestClient(app, base_url="http://localhost", headers={"Authorization": "Bearer key"}) as client:
        assert client.portal is not None
        client.portal.call(app_state(app).settled.wait)
        yield Served(client, app)


def beside(name: str) -> dict[str, Any]:
    """So that answers are short and the bounds of an answer do not contradict each other."""
    if name in SETTINGS["max_tokens"].openai_names:
        return {}
    return {"max_tokens": MAX_TOKENS if name == "min_tokens" else 2}


# ---------------------------------------------------------------------- surfaces: None, or the refusal


def asked_in_python(served: Served, name: str, value: Any) -> str | None:
    async def ask() -> None:
        if name == "max_objects":
            await served.engine.point(SCENE, "cow", **{name: value})
        else:
            picture = SCENE if name == "max_crops" else None
            await served.engine.query(picture, "Who?", reasoning=False, **beside(name), **{name: value})

    try:
        assert served.client.portal is not None
        served.client.portal.call(ask)
    except RequestError as error:
        return str(error)
    return None


def native_body(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    if name == "max_objects":
        return "/v1/point", {"image_url": TINY_PICTURE, "object": "cow", name: value}
    picture = {"image_url": TINY_PICTURE} if name == "max_crops" else {}
    return "/v1/query", {"question": "Who?", **picture, **beside(name), name: value}


def chat_body(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": TINY_PICTURE}}
    words = [picture, {"type": "text", "text": "Who?"}] if name == "max_crops" else "Who?"
    said = {"messages": [{"role": "user", "content": words}]}
    return "/v1/chat/completions", {**said, **beside(name), name: value}


def posted(served: Served, path: str, body: dict[str, Any], name: str) -> str | None:
    response = served.client.post(path, json=body)
    if response.status_code == 200:
        return None
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    return error["message"]


def typed(name: str, value: Any, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Settings are checked before the picture, and the picture before a model is loaded."""
    verb = ["point", "none.png", "cow"] if name == "max_objects" else ["query", "none.png", "Who?", "--json"]
    flag = f"--{name.replace('_', '-')}"
    assert run([*verb, flag, str(value)]) == 2
    told = capsys.readouterr().err.strip().removeprefix("kestrel: ").removeprefix("error: ")
    if "there is no file" in told:
        return None
    assert flag in told
    return told.replace(flag, name)


# ---------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("name", "value"), INSIDE, ids=names_of(INSIDE))
def test_a_value_at_a_bound_is_taken_everywhere(
    served: Served, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = ALL[name]
    assert asked_in_python(served, name, value) is None
    assert posted(served, *native_body(name, value), name) is None
    for openai_name in setting.openai_names:
        assert posted(served, *chat_body(openai_name, value), openai_name) is None
    if setting.has_flag:
        assert typed(name, value, capsys) is None


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=names_of(OUTSIDE))
def test_a_value_just_outside_is_refused_everywhere_in_the_same_words(
    served: Served, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = ALL[name]
    refusal = asked_in_python(served, name, value)
    assert refusal is not None
    assert refusal.startswith(f"{name}: ")
    words = refusal.split(" (got ")[0]  # JSON reads integers of more than 64 bits as floats
    told = [posted(served, *native_body(name, value), name)]
    for openai_name in setting.openai_names:
        in_openai = posted(served, *chat_body(openai_name, value), openai_name)
        told.append(in_openai and in_openai.replace(openai_name, name, 1))
    if setting.has_flag:
        told.append(typed(name, value, capsys))
    assert [one and one.split(" (got ")[0] for one in told] == [words] * len(told)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)][1:])
def test_sampling_params_keep_to_the_same_bounds(name: str) -> None:
    def make(value: Any) -> SamplingParams:
        given: Any = tuple(value.items()) if isinstance(value, dict) else value
        return SamplingParams(max_new_tokens=MAX_TOKENS, **{name: given})

    inside, outside = edges(SETTINGS[name])
    for value in inside:
        make(value)
    for value in outside:
        with pytest.raises(RequestError) as caught:
            make(value)
        assert caught.value.field == name


@pytest.mark.parametrize("name", ALL)
def test_the_descriptions_of_both_apis_say_the_same(served: Served, name: str) -> None:
    paths = served.app.openapi()["paths"]

    def schema_of(path: str) -> Schema:
        return paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    bodies: list[Callable[[Any], tuple[str, dict[str, Any]]]] = [lambda value: native_body(name, value)]
    for openai_name in ALL[name].openai_names:
        bodies.append(lambda value, openai_name=openai_name: chat_body(openai_name, value))
    inside, outside = edges(ALL[name])
    for body in bodies:
        for value, is_good in [(value, True) for value in inside] + [(value, False) for value in outside]:
            path, given = body(value)
            # Bounds of a description are floats, in which the seed above the last is that seed.
            assert Draft202012Validator(schema_of(path)).is_valid(given) is (is_good or value == MAX_SEED + 1)


def test_every_flag_of_the_command_line_tells_the_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, bound in (("query", "max_objects"), ("point", "max_tokens")):
        assert run([verb, "--help-all"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        for name, setting in SETTINGS.items():
            is_shown = setting.has_flag and name != bound
            assert (f"--{name.replace('_', '-')}" in told) is is_shown
            assert (setting.meaning.replace("`", "") in told) is is_shown
