"""Through the public engine: answers that ended by themselves are valid for their schema, whatever the weights say.

The golden models have random weights and write random text, so nothing but the constraint makes their answers valid.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.constraints import compiler
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.constraints.formats import ResponseFormat
from kestrel.engine import InferenceEngine, pools
from kestrel.engine.pools import FormatThreads
from kestrel.errors import CapacityError, EngineStopped, QueueFull, RequestCancelled, RequestError
from tests.constraints.json_walks import SCHEMAS, assert_valid
from tests.engine.conftest import GOLDENS, MakeEngine
from tests.engine.fake_engine import fake_engine
from tests.exhaustive import sweep
from tests.scene import SCENE

PICTURE = GOLDENS / "image_small.png"
QUESTION = {"question": "What is it?", "reasoning": False}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@sweep("family", ["md2", "md3"], always=["md3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_schema_is_kept_by_random_weights(
    family: str, temperature: float, make_coarse_engine: MakeEngine
) -> None:
    engine = await make_coarse_engine(family, max_batch_size=16)
    how = {"temperature": temperature, "top_p": 1.0, "max_tokens": 250, "seed": 5}
    calls = [engine.run("query", **QUESTION, **how, response_format=of_schema(schema)) for schema in SCHEMAS.values()]
    for (name, schema), result in zip(SCHEMAS.items(), await asyncio.gather(*calls), strict=True):
        assert result.finish_reason == "stop", name
        assert_valid(result.output["answer"], schema)


async def test_a_seed_gives_the_same_answer_again_and_another_seed_another(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")

    async def ask(seed: int) -> str:
        wanted = of_schema(SCHEMAS["person"])
        result = await engine.run(
            "query", **QUESTION, temperature=1.0, top_p=1.0, seed=seed, max_tokens=250, response_format=wanted
        )
        return result.output["answer"]

    first, again, other = await asyncio.gather(ask(1), ask(1), ask(2))
    assert first == again != other


async def test_any_object_is_json_when_it_ends(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3", max_batch_size=16)
    how = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 60, "response_format": {"type": "json_object"}}
    results = await asyncio.gather(*(engine.run("query", **QUESTION, **how, seed=seed) for seed in range(24)))
    ended = [result for result in results if result.finish_reason == "stop"]
    assert ended
    for result in ended:
        assert isinstance(json.loads(result.output["answer"]), dict)
    for result in results:
        assert result.output["answer"].startswith("{")
        assert result.finish_reason == "stop" or result.metrics.output_tokens == 60


@pytest.mark.exhaustive
async def test_eight_schemas_and_strangers_share_a_batch(make_coarse_engine: MakeEngine) -> None:
    """fp32: the strangers answer exactly as alone."""
    engine = await make_coarse_engine("md2", max_batch_size=16, dtype="float32")
    free = [
        {"question": question, "reasoning": False, "temperature": 0.0, "max_tokens": 40} for question in ("a", "b c")
    ]
    free += [dict(free[0], image=PICTURE), dict(free[1], temperature=1.0, seed=3)]
    alone = [(await engine.run("query", **one)).output for one in free]
    schemas = list(SCHEMAS.values())[:8]
    bound = [
        engine.run("query", **QUESTION, temperature=1.0, seed=i, max_tokens=250, response_format=of_schema(schema))
        for i, schema in enumerate(schemas)
    ]
    results = await asyncio.gather(*bound, *(engine.run("query", **one) for one in free))
    assert [result.output for result in results[8:]] == alone
    for schema, result in zip(schemas, results, strict=False):
        assert result.finish_reason == "stop"
        assert_valid(result.output["answer"], schema)


@sweep("skill", ["query", "chat", "complete"], always=["chat"])
async def test_each_text_skill_takes_a_format_with_a_picture(skill: str, make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    schema = SCHEMAS["person"]
    own: dict[str, Any] = {
        "query": QUESTION,
        "chat": {"messages": [{"role": "user", "content": "Who is it?"}], "reasoning": False},
        "complete": {"prompt": "It is "},
    }[skill]
    result = await engine.run(skill, image=PICTURE, **own, max_tokens=200, response_format=of_schema(schema))
    assert result.finish_reason == "stop"
    assert_valid(result.output["text" if skill == "complete" else "answer"], schema)
    text = await engine.run(skill, **own, max_tokens=5, temperature=0.0, response_format={"type": "text"})
    assert text.output == (await engine.run(skill, **own, max_tokens=5, temperature=0.0)).output


async def test_thinking_is_free_and_the_answer_is_not(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    how = {"question": "What is it?", "reasoning": True, "temperature": 0.0, "max_tokens": 60}
    free, result = await asyncio.gather(
        engine.run("query", **how),
        engine.run("query", **how, response_format=of_schema(SCHEMAS["bounded integers"])),
    )
    assert result.output["reasoning"] == free.output["reasoning"]
    assert_valid(result.output["answer"], SCHEMAS["bounded integers"])


async def test_a_stream_brings_the_same_text_in_pieces(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    how = {**QUESTION, "temperature": 0.0, "max_tokens": 250, "response_format": of_schema(SCHEMAS["nested"])}
    stream = await engine.run("query", stream=True, **how)
    pieces = [chunk.text async for chunk in stream]
    assert len(pieces) > 2
    assert "".join(pieces) == (await engine.run("query", **how)).output["answer"]


async def test_a_budget_leaves_the_beginning_of_a_valid_answer(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    how = {**QUESTION, "temperature": 0.0, "response_format": of_schema(SCHEMAS["person"])}
    whole = (await engine.run("query", **how, max_tokens=250)).output["answer"]
    cut = await engine.run("query", **how, max_tokens=6)
    assert cut.finish_reason == "length"
    assert whole.startswith(cut.output["answer"].rstrip("\ufffd"))


async def test_cancelling_gives_the_row_back(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3", max_batch_size=1)
    long = {**QUESTION, "max_tokens": 600, "response_format": of_schema({"type": "string", "minLength": 9000})}
    stream = await engine.run("query", stream=True, request_id="long", **long)
    await asyncio.sleep(0.2)
    engine.cancel("long")
    with pytest.raises(RequestCancelled):
        await stream.result()
    result = await engine.run("query", **QUESTION, max_tokens=99, response_format=of_schema(SCHEMAS["choice"]))
    assert_valid(result.output["answer"], SCHEMAS["choice"])


@pytest.mark.exhaustive
async def test_the_embedded_model_fills_in_a_form() -> None:
    schema = {
        "type": "object",
        "properties": {
            "is_there_a_bee": {"enum": ["yes", "no"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 20},
        },
        "required": ["is_there_a_bee", "count"],
        "additionalProperties": False,
    }
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=600)) as engine:
        question = {"question": "Is there a bee?", "reasoning": False, "temperature": 0.0, "max_tokens": 60}
        form, plain = await asyncio.gather(
            engine.run("query", image=SCENE, **question, response_format=of_schema(schema)),
            engine.run("query", image=SCENE, **question),
        )
        assert plain.text == "yes", "the scene has three bees"
        assert form.finish_reason == "stop"
        assert_valid(form.text, schema)
        choice = {"type": "choice", "choices": ["yes", "no"]}
        assert (await engine.run("query", image=SCENE, **question, response_format=choice)).text == plain.text


@pytest.mark.exhaustive
async def test_tight_memory_changes_no_structured_answer(make_coarse_engine: MakeEngine) -> None:
    """Few pages: sequences are preempted in the middle of their answer."""
    how = {"reasoning": False, "temperature": 0.0, "max_tokens": 250, "response_format": of_schema(SCHEMAS["nested"])}
    wanted = [{"question": letter * 290, **how} for letter in "XYZ"]
    roomy = await make_coarse_engine("md2")
    expected = [result.output for result in await asyncio.gather(*(roomy.run("query", **one) for one in wanted))]
    tight = await make_coarse_engine(
        "md2", kv_cache_pages=240, page_size=4, max_batch_size=3, enable_prefix_cache=False
    )
    results = await asyncio.gather(*(tight.run("query", **one) for one in wanted))
    assert sum(result.metrics.num_preemptions for result in results) > 0
    assert [result.output for result in results] == expected


async def test_a_step_in_flight_changes_nothing() -> None:
    """The fake runtime keeps one step in flight, as a GPU does."""
    engine = fake_engine()
    try:
        calls = [
            engine.run("query", **QUESTION, max_tokens=400, response_format=of_schema(schema))
            for schema in SCHEMAS.values()
        ]
        results = await asyncio.gather(*calls, engine.run("query", **QUESTION, max_tokens=50))
        for (name, schema), result in zip(SCHEMAS.items(), results, strict=False):
            if result.finish_reason == "stop":
                assert_valid(result.output["answer"], schema)
            else:
                assert name != "choice"
        assert sum(result.finish_reason == "stop" for result in results[:-1]) > len(SCHEMAS) // 2
    finally:
        await engine.shutdown(drain=False)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "yaml"},
        of_schema({"type": "frog"}),
        of_schema({"$ref": "#"}),
        of_schema({"properties": {"c": {"$ref": "#"}}, "required": ["c"], "type": "object"}),
        of_schema({"enum": ["x" * 100_000]}),
        {"type": "regex", "regex": "("},
        {"type": "regex", "regex": "((a{99}){99}){99}"},
    ],
    ids=lambda wanted: str(wanted)[:60],
)
async def test_a_bad_format_fails_alone_and_leaves_nothing_behind(wanted: dict[str, Any]) -> None:
    engine = fake_engine()
    try:
        good = asyncio.create_task(engine.run("query", **QUESTION, max_tokens=30))
        with pytest.raises(RequestError, match=r"^response_format"):
            await engine.run("query", **QUESTION, response_format=wanted)
        assert (await good).output["answer"]
        assert engine.num_requests == 0
        assert engine.is_running
    finally:
        await engine.shutdown(drain=False)


async def test_skills_that_write_no_free_text_refuse_a_format() -> None:
    engine = fake_engine()
    try:
        for skill, own in (("caption", {}), ("point", {"object": "x"}), ("detect", {"object": "x"})):
            with pytest.raises(RequestError, match="response_format: is not a field"):
                await engine.run(skill, image=PICTURE, **own, response_format={"type": "json_object"})
        with pytest.raises(RequestError, match="allowed_ids"):
            await engine.run("query", **QUESTION, allowed_ids=[30], response_format={"type": "json_object"})
    finally:
        await engine.shutdown(drain=False)


async def test_formats_wait_for_each_other_in_a_queue_that_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING", 6)
    threads, may_go_on = FormatThreads(None), threading.Event()
    waiting = [asyncio.create_task(threads.run(False, may_go_on.wait, 60)) for _ in range(6)]
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull, match="6 answer formats are waiting"):
        await threads.run(False, int, "7")
    assert await threads.run(True, int, "7") == 7
    waiting.pop().cancel()
    await asyncio.sleep(0)
    late = asyncio.create_task(threads.run(False, int, "8"))
    may_go_on.set()
    assert await asyncio.gather(*waiting) == [True] * 5
    assert await late == 8
    threads.close()


async def test_reading_the_vocabulary_does_not_hold_the_loop() -> None:
    engine = fake_engine()
    constraints = engine.profile.constraints
    assert isinstance(constraints, ConstraintCompiler)
    read, is_reading, may_go_on = constraints._tokenizer_json, threading.Event(), threading.Event()
    went_on: list[bool] = []

    def slowly() -> str:
        is_reading.set()
        went_on.append(may_go_on.wait(60))
        return read()

    constraints._tokenizer_json = slowly
    try:
        how = {**QUESTION, "max_tokens": 3}
        asked = [
            asyncio.create_task(engine.run("query", **how, response_format=of_schema(SCHEMAS[name])))
            for name in ("person", "choice")
        ]
        while not is_reading.is_set():
            await asyncio.sleep(0.01)
        asked.append(asyncio.create_task(engine.run("query", **how, response_format=of_schema(SCHEMAS["number"]))))
        await asyncio.sleep(0.05)
        may_go_on.set()
        assert all(result.output["answer"] for result in await asyncio.gather(*asked))
        assert went_on == [True]
    finally:
        await engine.shutdown(drain=False)


async def test_a_slow_format_holds_up_neither_the_loop_nor_another_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    compile_it, may_go_on = ConstraintCompiler._compile, threading.Event()

    def slowly(self: ConstraintCompiler, wanted: ResponseFormat) -> Any:
        if "friends" in wanted.text:
            may_go_on.wait(60)
        return compile_it(self, wanted)

    monkeypatch.setattr(ConstraintCompiler, "_compile", slowly)
    try:
        how = {**QUESTION, "max_tokens": 3}
        slow = asyncio.create_task(engine.run("query", **how, response_format=of_schema(SCHEMAS["nested"])))
        await asyncio.sleep(0.05)
        for name in ("person", "choice", "number"):
            assert (await engine.run("query", **how, response_format=of_schema(SCHEMAS[name]))).output["answer"]
        assert not slow.done()
        may_go_on.set()
        assert (await slow).output["answer"]
    finally:
        may_go_on.set()
        await engine.shutdown(drain=False)


async def test_a_shutdown_ends_a_format_that_is_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "check_schema", lambda name, schema: None)
    engine = fake_engine()
    endless = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(24)]}
    await engine.run("query", **QUESTION, max_tokens=3, response_format=of_schema(SCHEMAS["person"]))
    constraints = engine.profile.constraints
    assert isinstance(constraints, ConstraintCompiler)
    assert constraints._trials is not None
    running = constraints._trials.pid
    asked = asyncio.create_task(engine.run("query", **QUESTION, response_format=of_schema(endless)))
    await asyncio.sleep(0.1)
    await engine.shutdown(drain=False, timeout_s=0.1)
    with pytest.raises((EngineStopped, CapacityError)):
        await asked
    assert running is not None
    assert not Path(f"/proc/{running}").exists()


async def test_a_format_that_is_kept_does_not_wait_for_one_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one is real in all but its time, which a hostile schema may take."""
    engine = fake_engine()
    compile_it, is_compiling, may_go_on = ConstraintCompiler._compile, threading.Event(), threading.Event()

    def slowly(self: ConstraintCompiler, wanted: ResponseFormat) -> Any:
        is_compiling.set()
        may_go_on.wait(60)
        return compile_it(self, wanted)

    try:
        known, new = of_schema(SCHEMAS["person"]), of_schema(SCHEMAS["nested"])
        await engine.run("query", **QUESTION, max_tokens=3, response_format=known)
        monkeypatch.setattr(ConstraintCompiler, "_compile", slowly)
        slow = asyncio.create_task(engine.run("query", **QUESTION, max_tokens=3, response_format=new))
        await asyncio.to_thread(is_compiling.wait, 60)
        quick = engine.run("query", **QUESTION, max_tokens=3, response_format=known)
        assert (await asyncio.wait_for(quick, 50)).output["answer"].startswith("{")
        assert not slow.done()
        may_go_on.set()
        assert (await slow).output["answer"].startswith("{")
    finally:
        may_go_on.set()
        await engine.shutdown(drain=False)


async def test_the_deepest_references_within_the_limits_do_not_exhaust_the_stack() -> None:
    """On a usual stack some six hundred references to each other end the process."""
    levels = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(199)} | {"a199": {"type": "null"}}
    engine = fake_engine()
    try:
        wanted = of_schema({"$ref": "#/$defs/a0", "$defs": levels})
        result = await engine.run("query", **QUESTION, max_tokens=20, response_format=wanted)
        assert result.output["answer"]
    finally:
        await engine.shutdown(drain=False)
