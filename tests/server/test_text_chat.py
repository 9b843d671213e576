"""Chat completions of a text model with a template: a small random Llama, whose answers the engine itself gives too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kestrel.config import RuntimeConfig
from kestrel.engine.compute_process import ComputeProcess
from kestrel.errors import ConfigError
from kestrel.families import ready_model
from kestrel.known_models import registered_models
from kestrel.server.config import ServerConfig
from kestrel.skills.base import ModelProfile
from kestrel.skills.builtin import WITH_PICTURES
from tests.llama.chat_shapes import OPEN_THOUGHT, THINKING
from tests.llama.tiny_folders import write_folder
from tests.server.conftest import SCENE_URL, RunningServer, runtime_config, start_server

EXAMPLES = Path(__file__).parents[2] / "examples"
MARKED, UNMARKED = ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("text") / "tiny-llama", "llama", max_position_embeddings=1024)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKED])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in UNMARKED])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": THINKING}))
    return folder


@pytest.fixture(scope="module")
def texts(_one_thread: None, folder: Path) -> Iterator[RunningServer]:
    yield from start_server(ServerConfig(port=0), runtime_config(model_path=folder, page_size=4))


@pytest.fixture
def client(texts: RunningServer) -> Iterator[httpx.Client]:
    with texts.client() as client:
        yield client


def chat(client: httpx.Client, messages: list[Any] = HELLO, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": messages, **SHORT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, messages: list[Any] = HELLO, **fields: Any) -> tuple[str, str]:
    response = client.post("/v1/chat/completions", json={"messages": messages, **SHORT, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def test_a_text_model_answers_streamed_and_whole_alike(client: httpx.Client, texts: RunningServer) -> None:
    whole = chat(client)
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.from_str(texts.engine.profile.tokenizer.to_json())  # pyright: ignore
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    direct = texts.on_loop(lambda: texts.engine.run("complete", prompt=ids, **SHORT))
    message = whole["choices"][0]["message"]
    assert message["content"] == direct.text
    assert whole["usage"]["prompt_tokens"] == len(ids)
    sdk = openai.OpenAI(base_url=f"{texts.url}/v1", api_key="none")
    chunks = list(
        sdk.chat.completions.create(
            model="tiny-llama", messages=HELLO, stream=True, stream_options={"include_usage": True}, **SHORT
        )  # pyright: ignore
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == direct.text
    assert chunks[-1].usage.total_tokens == whole["usage"]["total_tokens"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ids_of(client: httpx.Client, messages: list[Any], **fields: Any) -> list[int]:
    return client.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]


def test_a_second_question_computes_only_its_own_words(client: httpx.Client) -> None:
    system = {"role": "system", "content": "Speak of many things, as long as they are known to all. " * 2}
    first, second = ([system, {"role": "user", "content": text}] for text in ("Which?", "Where?"))
    assert cached(chat(client, first)) < 20
    both = zip(ids_of(client, first), ids_of(client, second), strict=True)
    num_shared = next(at for at, (one, other) in enumerate(both) if one != other)
    assert num_shared > 110
    assert cached(chat(client, second)) == num_shared


def test_a_further_turn_computes_only_its_own_words(client: httpx.Client) -> None:
    """Of an answer that was cut, the last token has not been read by the model yet."""
    turns = [{"role": "system", "content": "Speak of the turns of one long conversation."}, *HELLO]
    for fields, num_unread in (
        ({"response_format": {"type": "regex", "regex": "[ab]{9}"}}, 0),
        ({"ignore_eos": True, "logit_bias": {"65": 100}}, 1),
    ):
        answer = chat(client, turns, **fields)
        said = answer["choices"][0]["message"]["content"]
        longer = [*turns, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
        known = answer["usage"]["prompt_tokens"] + len(said) - num_unread
        assert cached(chat(client, longer)) == known
        turns = longer


def test_a_thought_stands_beside_the_answer(client: httpx.Client, texts: RunningServer) -> None:
    opens, closes = (texts.engine.profile.chat.thinking.opens, texts.engine.profile.chat.thinking.closes)  # pyright: ignore
    always = {"logit_bias": {str(opens): 100}, "ignore_eos": True}
    answer = chat(client, **always)
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"] == "<think>" * 11, "a second opening id is text"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert "reasoning_content" not in chat(client, include_reasoning=False, **always)["choices"][0]["message"]
    assert chat(client, include_reasoning=True, **always)["choices"][0]["message"] == message
    direct = chat(client, chat_template_kwargs={"enable_thinking": False}, logit_bias={str(closes): 100})
    assert "reasoning_content" not in direct["choices"][0]["message"]
    off = chat(client, chat_template_kwargs={"enable_thinking": False})["usage"]["prompt_tokens"]
    assert off > chat(client)["usage"]["prompt_tokens"]
    assert chat(client, reasoning_effort="none")["usage"]["prompt_tokens"] == off
    with client.stream(
        "POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True, **SHORT, **always}
    ) as r:
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in r.iter_lines() if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]


def test_what_cannot_be_written_is_refused_by_name(client: httpx.Client) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SCENE_URL}}]}]
    place, message = refusal(client, picture)
    assert place == "messages[0].content[0].image_url"
    assert (
        f"tiny-llama reads no pictures; leave the picture out, or use a model that does, such as {WITH_PICTURES}"
        in message
    )
    assert WITH_PICTURES in {spec.name for spec in registered_models()}
    assert refusal(client, chat_template_kwargs={"messages": []})[0] == "chat_template_kwargs.messages"
    assert refusal(client, chat_template_kwargs=[1])[0] == "chat_template_kwargs"
    assert refusal(client, chat_template_kwargs={"a": list(range(20_000))})[0] == "chat_template_kwargs"
    assert refusal(client, [{"role": "wizard", "content": "a"}])[0] == "messages[0].role"
    assert refusal(client, [{"role": "user", "content": "a", "name": 5}])[0] == "messages[0].name"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(client, **both)[0] == "continue_final_message"
    assert refusal(client, [{"role": "user", "content": None}])[0] == "messages[0].content"
    assert client.post("/v1/query", json={"question": "what?"}).json()["error"]["message"].endswith(WITH_PICTURES)


def test_roles_and_kept_answers_go_through(client: httpx.Client) -> None:
    turns = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "reasoning_content": "d", "refusal": None},
        {"role": "tool", "content": "e", "tool_call_id": "f"},
    ]
    assert chat(client, turns)["usage"]["prompt_tokens"] > 40
    called = {"id": "f", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}}
    calls = [*turns[:2], {"role": "assistant", "tool_calls": [called]}, turns[3]]
    said = {"role": "assistant", "content": '{"name": "g", "parameters": {"x": 1}}'}
    words = [*turns[:2], said, {"role": "user", "content": "e"}]
    ids = [client.post("/tokenize", json={"messages": messages}).json()["tokens"] for messages in (calls, words)]
    assert ids[0] == ids[1]
    going_on = chat(client, [*HELLO, {"role": "assistant", "content": "He"}], continue_final_message=True)
    opened = chat(client, [*HELLO, {"role": "assistant", "content": "He"}])
    assert going_on["usage"]["prompt_tokens"] < opened["usage"]["prompt_tokens"]


def test_the_ids_of_a_conversation_are_shown_without_an_answer(client: httpx.Client, texts: RunningServer) -> None:
    tokenizer = Tokenizer.from_str(texts.engine.profile.tokenizer.to_json())  # pyright: ignore
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "He"}]}]
    for messages, fields, end in (
        (HELLO, {}, "<|im_start|>assistant\n"),
        (HELLO, {"add_generation_prompt": False}, ""),
        (begun, {"continue_final_message": True}, "<|im_start|>assistant\nHe"),
        (HELLO, {"reasoning_effort": "none"}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (HELLO, {"chat_template_kwargs": {"enable_thinking": False}}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ):
        answer = client.post("/tokenize", json={"messages": messages, **fields}).json()
        shown = tokenizer.decode(answer["tokens"], skip_special_tokens=False)
        assert shown == f"<|im_start|>user\nHello<|im_end|>\n{end}"
        assert answer["count"] == chat(client, messages, **fields)["usage"]["prompt_tokens"]


def test_the_template_is_shown_to_those_who_ask(client: httpx.Client) -> None:
    assert client.get("/tokenizer_info").json()["chat_template"] == THINKING


# ---------------------------------------------------------------------- other templates


def profile(folder: Path, **fields: Any) -> ModelProfile:
    return ready_model(RuntimeConfig(model_path=folder, device="cpu", kv_cache_pages=50, **fields)).profile


def test_a_given_template_replaces_the_models_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("other")
    own, other = profile(folder), profile(folder, chat_template=file)
    assert own.chat is not None
    assert other.chat is not None
    assert (own.chat.template, other.chat.template) == (THINKING, "other")
    with pytest.raises(ConfigError, match="chat_template: kestrel-tiny has a chat format of its own"):
        ready_model(RuntimeConfig(device="cpu", kv_cache_pages=200, chat_template=file))


def test_a_chat_format_comes_over_from_the_process_that_computes(folder: Path) -> None:
    with ComputeProcess(RuntimeConfig(model_path=folder, device="cpu", kv_cache_pages=50)) as process:
        found = process.ready().profile
    assert found.chat is not None
    assert found.chat.template == THINKING
    assert found.tokenizer.encode("<s>") != [256]


def test_a_format_holds_behind_a_thought_that_the_template_opened(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "thinker")
    (copy / "chat_template.jinja").write_text(OPEN_THOUGHT)
    for server in start_server(ServerConfig(port=0), runtime_config(model_path=copy, page_size=4)):
        with server.client() as client:
            wanted = {"type": "regex", "regex": "[ab]{3}"}
            answer = chat(client, response_format=wanted, max_tokens=5, ignore_eos=True)
            message = answer["choices"][0]["message"]
            assert message["content"] in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
            assert message["reasoning_content"]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
            free = chat(client, max_tokens=5)["choices"][0]["message"]
            assert (free["content"], bool(free["reasoning_content"])) == ("", True)


# ---------------------------------------------------------------------- examples


def test_the_example_with_curl_shows_every_kind_of_completion(client: httpx.Client, texts: RunningServer) -> None:
    told = subprocess.run(["bash", EXAMPLES / "completions.sh", texts.url], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")
    choices, *streamed, tokens, continued, scored = (line for line in told.stdout.splitlines() if line)
    assert [choice["index"] for choice in json.loads(choices)["choices"]] == [0, 1, 2, 3]
    assert streamed[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in streamed[:-1])
    assert json.loads(tokens)["tokens"][1:] == texts.engine.profile.tokenizer.encode("The capital of France is")
    assert json.loads(continued)["usage"]["prompt_tokens"] == 3
    (choice,) = json.loads(scored)["choices"]
    assert choice["text"] == "The capital of France is Paris"
    assert len(choice["logprobs"]["token_logprobs"]) == 31


def test_the_example_for_node_holds_a_conversation(texts: RunningServer, tmp_path: Path) -> None:
    packages, node = EXAMPLES.parent / "out" / "clients" / "node" / "node_modules", shutil.which("node")
    if node is None or not packages.is_dir():
        pytest.skip("no openai package for Node; run scripts/install-clients where npm is")
    shutil.copy(EXAMPLES / "chat.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(packages)
    command, place = [node, "chat.mjs", "Hello", "Why?"], {**os.environ, "KESTREL_URL": texts.url}
    told = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")
    (first, _), (second, cached) = re.findall(r"\((\d+) tokens of prompt, (\d+) of them cached\)", told.stdout)
    assert int(first) <= int(cached) < int(second)
