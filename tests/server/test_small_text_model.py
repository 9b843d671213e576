"""A real small text model behind a real server: lm-eval, many chats at once, and what they share."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kestrel.models.tokenizer import TextTokenizer
from tests.conftest import downloaded
from tests.server.programs import Program

pytestmark = pytest.mark.exhaustive
TASKS = Path(__file__).with_name("lm_eval_tasks")
STOP = "\n"
"""Of the task `kestrel_answers`."""


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--max-batch-size", "64", "--kv-cache-pages", "2000", "--max-seq-length", "1024")
    program = Program(tmp_path_factory.mktemp("serve") / "log", "--model-path", str(smollm2), *flags)
    yield program.url()
    program.kill()


# ---------------------------------------------------------------------- lm-eval


@pytest.fixture(scope="session")
def lm_eval() -> Path:
    return downloaded("KESTREL_LM_EVAL", "lm-eval", "install-lm-eval") / "bin" / "lm_eval"


@pytest.fixture(scope="module")
def published(smollm2: Path) -> Any:
    from tests.llama.reference import of_gguf  # noqa: PLC0415 - imports transformers

    return of_gguf(smollm2)


def samples(lm_eval: Path, folder: Path, model: str, arguments: str, tasks: str, *flags: str) -> dict[str, list[Any]]:
    """What lm-eval got for each document, by task."""
    command = [lm_eval, "run", "--model", model, "--model_args", arguments, "--include_path", ".", "--tasks", tasks]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    told = subprocess.run(
        [*command, "--output_path", str(folder / "out"), "--log_samples", *flags],
        cwd=TASKS,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    found = {path.stem: path.read_text().splitlines() for path in (folder / "out").rglob("samples_*.jsonl")}
    return {
        task: [
            json.loads(line) for stem, lines in found.items() if stem.startswith(f"samples_{task}_") for line in lines
        ]
        for task in tasks.split(",")
    }


@torch.inference_mode()
def likelihood(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum and greediness, as lm-eval has them."""
    scores = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    chosen = scores[range(len(continuation)), continuation]
    return float(chosen.sum()), bool((chosen == scores.max(-1).values).all())


@torch.inference_mode()
def greedy_text(model: Any, tokenizer: TextTokenizer, prompt: list[int], count: int) -> str:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(found[0, len(prompt) :].tolist()).split(STOP)[0]


@pytest.mark.parametrize("sent_as", ["ids", "texts"])
def test_lm_eval_finds_the_likelihoods_and_answers_of_transformers(
    sent_as: str, url: str, lm_eval: Path, smollm2: Path, published: Any, tmp_path: Path
) -> None:
    arguments = f"base_url={url}/v1/completions,model={smollm2.stem},tokenizer_backend=remote,num_concurrent=2"
    if sent_as == "texts":
        arguments += ",tokenized_requests=False"
    tasks = ["kestrel_facts", "kestrel_answers"] + ["kestrel_texts"] * (sent_as == "ids")
    found = samples(lm_eval, tmp_path, "local-completions", arguments, ",".join(tasks))
    tokenizer = TextTokenizer.from_file(smollm2)
    for sample in found["kestrel_facts"]:
        for asked, ((told, is_greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context = tokenizer.encode(asked["arg_0"])
            whole = tokenizer.encode(asked["arg_0"] + asked["arg_1"])
            expected, expected_greedy = likelihood(published, context, whole[len(context) :])
            assert float(told) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(expected_greedy)
    for sample in found["kestrel_answers"]:
        prompt = tokenizer.encode(sample["arguments"]["gen_args_0"]["arg_0"])
        assert sample["resps"] == [[greedy_text(published, tokenizer, prompt, 12)]]
    assert "Paris" in found["kestrel_answers"][0]["resps"][0][0]
    for sample in found.get("kestrel_texts", ()):
        text = tokenizer.encode(sample["arguments"]["gen_args_0"]["arg_0"])
        expected, _ = likelihood(published, [published.config.eos_token_id[0]], text)
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-3)


def test_lm_eval_finds_the_chat_answers_of_transformers(
    url: str, lm_eval: Path, smollm2: Path, published: Any, tmp_path: Path
) -> None:
    arguments = f"base_url={url}/v1/chat/completions,model={smollm2.stem},num_concurrent=2"
    found = samples(lm_eval, tmp_path, "local-chat-completions", arguments, "kestrel_answers", "--apply_chat_template")[
        "kestrel_answers"
    ]
    tokenizer = TextTokenizer.from_file(smollm2)
    for sample in found:
        (messages,) = sample["arguments"]["gen_args_0"]["arg_0"]
        prompt = httpx.post(f"{url}/tokenize", json={"messages": json.loads(messages)}).json()["tokens"]
        assert sample["resps"] == [[greedy_text(published, tokenizer, prompt, 12)]]


# ---------------------------------------------------------------------- chats


def asking(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You answer in few words."}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, **fields}


def test_a_further_turn_computes_only_its_own_words(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        first = client.post("/v1/chat/completions", json=asking("What is the capital of Peru?", max_tokens=60)).json()
        (choice,) = first["choices"]
        assert choice["finish_reason"] == "stop"
        body = asking("What is the capital of Peru?", max_tokens=1)
        body["messages"] += [choice["message"], {"role": "user", "content": "And of Chile?"}]
        second = client.post("/v1/chat/completions", json=body).json()
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known


WHAT = (
    "What is {}?", "Where do people use {}?", "Who made {} first?", "Name a word that rhymes with {}.",
    "Is {} heavy?", "Write a title for a story about {}.", "How old can {} be?", "Translate {} into French.",
    "What colour is {}?", "How does {} sound?", "Which animal likes {}?", "Why is {} useful?",
    "What costs more than {}?", "How do I draw {}?", "What is the opposite of {}?", "Tell me a joke about {}.",
)  # fmt: skip
THINGS = (
    "a bridge", "an apple", "a river", "music", "a violin", "the moon", "a clock", "bread", "a letter", "snow",
    "a ladder", "the sea", "a mirror", "salt", "a train", "an umbrella",
)  # fmt: skip
QUESTIONS = [what.format(thing) for what in WHAT for thing in THINGS]
"""The two likeliest tokens of their answers are nowhere closer than 8e-4, so that rounding cannot exchange them."""


async def streamed(client: httpx.AsyncClient, question: str) -> tuple[str, str]:
    """Id and text of an answer that came whole and in order."""
    body = asking(question, max_tokens=8, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    (answer_id,) = {chunk["id"] for chunk in chunks}
    return answer_id, "".join(choice["delta"]["content"] for choice in choices)


async def test_many_chats_at_once_each_say_what_they_say_alone(url: str, smollm2: Path, tmp_path: Path) -> None:
    """Alone: on a server that keeps no prefixes of others either. Every fourth of them is asked there."""
    assert len(set(QUESTIONS)) == 256
    everybody = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=everybody) as client:
        together = await asyncio.gather(*(streamed(client, question) for question in QUESTIONS))
    assert len({answer_id for answer_id, _ in together}) == len(QUESTIONS)
    texts = [text for _, text in together]
    assert len(set(texts)) > 200
    flags = ("--no-enable-prefix-cache", "--max-seq-length", "1024")
    lonely = Program(tmp_path / "log", "--model-path", str(smollm2), *flags)
    try:
        async with httpx.AsyncClient(base_url=lonely.url(), timeout=600) as client:
            assert [(await streamed(client, question))[1] for question in QUESTIONS[::4]] == texts[::4]
    finally:
        lonely.kill()
