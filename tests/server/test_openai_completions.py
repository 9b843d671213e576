"""Completions: prompts in every form, echo, and log-probabilities as lm-eval reads them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import RunningServer

LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = client.post(
        "/v1/completions", json={"model": "kestrel-tiny", "prompt": prompt, "temperature": 0, **fields}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return answer


def encode(server: RunningServer, text: str) -> list[int]:
    return server.engine.profile.tokenizer.encode(text)


def test_a_prompt_is_continued_as_the_engine_does(client: httpx.Client, server: RunningServer) -> None:
    direct = server.on_loop(lambda: server.engine.submit("Who are you?", temperature=0.0, max_tokens=7))
    answer = complete(client, "Who are you?", max_tokens=7)
    assert answer["choices"] == [{"index": 0, "text": direct.text, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["prompt_tokens"] == direct.metrics.input_tokens
    assert answer["usage"]["completion_tokens"] == 7


def test_every_form_of_prompt_says_the_same(client: httpx.Client, server: RunningServer) -> None:
    texts = ["Who are you?", "a bee"]
    ids = [[server.engine.profile.bos, *encode(server, text)] for text in texts]
    alone = [complete(client, text, max_tokens=5)["choices"][0]["text"] for text in texts]
    for prompt in (texts, ids):
        assert [choice["text"] for choice in complete(client, prompt, max_tokens=5)["choices"]] == alone
    assert complete(client, ids[0], max_tokens=5)["choices"][0]["text"] == alone[0]


def test_choices_of_several_prompts_stand_in_order_and_share_their_prompt(client: httpx.Client) -> None:
    warm = {
        "temperature": 2.0,
        "top_p": 1.0,
        "repetition_penalty": 2.0,
        "ignore_eos": True,
        "max_tokens": 12,
        "seed": 3,
    }
    both = complete(client, ["Who are you?", "a bee"], n=2, **warm)
    first, second = (complete(client, prompt, n=2, **warm) for prompt in ("Who are you?", "a bee"))
    texts = [choice["text"] for one in (first, second) for choice in one["choices"]]
    assert [choice["text"] for choice in both["choices"]] == texts
    assert both["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]


def test_without_a_bound_sixteen_tokens_are_enough(client: httpx.Client) -> None:
    assert complete(client, "Who are you?", ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_puts_the_prompt_before_the_text(client: httpx.Client, server: RunningServer, max_tokens: int) -> None:
    text = "Who are you?"
    plain = "" if max_tokens == 0 else complete(client, text, max_tokens=max_tokens)["choices"][0]["text"]
    for prompt in (text, [server.engine.profile.bos, *encode(server, text)]):
        (choice,) = complete(client, prompt, echo=True, max_tokens=max_tokens)["choices"]
        assert (choice["text"], choice["logprobs"]) == (text + plain, None)


def test_echoed_columns_fit_the_text(client: httpx.Client) -> None:
    (choice,) = complete(client, "Wer bist du? Grün – 牛", echo=True, logprobs=2, max_tokens=6)["choices"]
    columns = choice["logprobs"]
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert columns["tokens"][0] == "<|endoftext|>"
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        if not token.startswith(("<|", "bytes:")):
            assert choice["text"][offset : offset + len(token)] == token
    for token, logprob, top in list(zip(*list(columns.values())[:3], strict=True))[1:]:
        assert top[token] == logprob
        assert len(top) in (2, 3)


def test_scores_of_an_echo_are_those_of_the_generation(client: httpx.Client, server: RunningServer) -> None:
    """What the model generated greedily it also scores as its first choice, by the very numbers."""
    start = [server.engine.profile.bos, *encode(server, "Who are you?")]
    direct = server.on_loop(lambda: server.engine.submit(start, temperature=0.0, max_tokens=8, logprobs=1))
    (choice,) = complete(client, [start + direct.output["token_ids"]], **LM_EVAL)["choices"]
    scores = choice["logprobs"]["token_logprobs"][len(start) : -1]
    assert scores == pytest.approx([entry["logprob"] for entry in direct.output["logprobs"]], abs=1e-4)


def lm_eval_reading(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Sum and greediness of a continuation, by exact comparison, as lm-eval 0.4 does it."""
    logprobs = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(logprobs), all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))


def test_lm_eval_finds_likelihood_and_greediness(client: httpx.Client, server: RunningServer) -> None:
    context = [server.engine.profile.bos, *encode(server, "Who are you?")]
    greedy = server.on_loop(lambda: server.engine.submit(context, temperature=0.0, max_tokens=5)).output["token_ids"]
    other = [*greedy[:-1], (greedy[-1] + 1) % server.engine.vocab_size]
    batch = [context + greedy, context + other, context + greedy[:2]]
    choices = complete(client, batch, **LM_EVAL)["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(prompt) + 1 for prompt in batch]
    readings = [lm_eval_reading(choice, len(context)) for choice in choices]
    assert [is_greedy for _, is_greedy in readings] == [True, False, True]
    direct = server.on_loop(lambda: server.engine.submit(batch[1], max_tokens=0, prompt_logprobs=1))
    truth = sum(entry["logprob"] for entry in direct.output["prompt_logprobs"][len(context) :])
    assert readings[1][0] == pytest.approx(truth, abs=1e-4)


def test_a_text_that_ends_at_once_still_has_an_entry_for_its_end(client: httpx.Client, server: RunningServer) -> None:
    """Else lm-eval, which drops the last entry, would drop a token of the prompt."""
    context = [server.engine.profile.bos, *encode(server, "Who are you?")]
    whole = server.on_loop(lambda: server.engine.submit(context, temperature=0.0, max_tokens=60))
    assert whole.finish_reason == "stop"
    prompt = context + whole.output["token_ids"]
    answer = complete(client, [prompt], **LM_EVAL)
    (choice,) = answer["choices"]
    columns = choice["logprobs"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 0)
    assert len(columns["tokens"]) == len(prompt) + 1
    assert columns["tokens"][-1] == "<|endoftext|>"
    assert columns["text_offset"][-1] == len(choice["text"])
    assert columns["token_logprobs"][-1] == max(columns["top_logprobs"][-1].values())
    scored = server.on_loop(
        lambda: server.engine.submit([*prompt, server.engine.profile.end_id], max_tokens=0, prompt_logprobs=1)
    )
    assert columns["token_logprobs"][-1] == pytest.approx(scored.output["prompt_logprobs"][-1]["logprob"], abs=1e-4)


def test_best_of_may_say_n(client: httpx.Client) -> None:
    assert len(complete(client, "a bee", n=2, best_of=2, max_tokens=1)["choices"]) == 2


def test_more_prompts_than_rows_are_all_answered(client: httpx.Client, server: RunningServer) -> None:
    prompts = [f"bee {number}" for number in range(3 * server.engine.max_batch_size)]
    answer = complete(client, prompts, max_tokens=2)
    assert len(answer["choices"]) == len(prompts)
    assert answer["choices"][-1]["text"] == complete(client, prompts[-1], max_tokens=2)["choices"][0]["text"]
