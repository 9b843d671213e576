"""Small chat templates in the shapes of the field, tokenizers for them, and what `transformers` makes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kestrel.models.control_encoder import ControlEncoder
from kestrel.models.tokenizer import TextTokenizer
from kestrel.skills.base import Conversation, Message
from kestrel.skills.template_chat import TemplateChat

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = 'today' %}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}
    {%- if loop.first and message.role == 'system' %}{{- 'Date: ' + date_string + '\n' }}{%- endif %}
    {{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\n\n' %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must alternate, sir') }}
    {%- endif %}
    {%- if turn['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.last else '') + turn['content'] + ' [/INST]' }}
    {%- else %}{{- ' ' + turn['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}"""
THINKING = """\
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 == ns.last and thought %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
NO_SYSTEM = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
OPEN_THOUGHT = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Help.') + '\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools> Write <tool_call>{"name": …}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
JSON_LINES = """\
{% for message in messages %}<|im_start|>{{ message | tojson }}{{ message.content.startswith('<b>') }}
{{ message.content[2:7] }}|{{ message.content.upper() }}|{{ message.content | replace('<', '[') }}<|im_end|>
{% endfor %}"""
SHAPES: dict[str, str] = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "thinking": THINKING, "no_system": NO_SYSTEM,
    "open_thought": OPEN_THOUGHT, "json_lines": JSON_LINES, "hermes": HERMES,
}  # fmt: skip

MARKED = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
UNMARKED = ("<think>", "</think>", "<tool_response>", "</tool_response>")
"""Added tokens that published files do not mark as special."""
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
_CORPUS = [
    "the cat sat on the mat\n\nthe dog saw  the cat\n user assistant system model\n",
    "a < b > c [1] [/2]",
    "\n\n",
]


@lru_cache
def byte_level(extra: tuple[str, ...] = (), unmarked: tuple[str, ...] = UNMARKED) -> str:
    """A tokenizer.json of a small vocabulary with merges over blanks and line breaks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_CORPUS, trainer)
    return _with_controls(made, extra, unmarked)


@lru_cache
def sentence_pieces(extra: tuple[str, ...] = ()) -> str:
    """One in which blanks are letters of their own, and a text begins with one."""
    letters = '\u2581abcdehimnorstuy[{":'
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "t"), ("\u2581", "\u2581"), ("s", "at")]
    merges += [("\u2581", "["), ("\u2581[", "{"), ("[", "{"), ('"', ":")]
    vocabulary = {piece: at for at, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([])  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    made.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_controls(made, extra, UNMARKED)


def _with_controls(made: Tokenizer, extra: tuple[str, ...], unmarked: tuple[str, ...]) -> str:
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*MARKED, *extra)])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in unmarked])
    return made.to_str()


@lru_cache
def text_tokenizer(described: str) -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_str(described))


@lru_cache
def encoder(described: str) -> ControlEncoder:
    return ControlEncoder(text_tokenizer(described))


def template_chat(text: str, described: str, names: Mapping[str, str] = NAMES) -> TemplateChat:
    return TemplateChat(text, names, encoder(described))


def conversation(messages: Sequence[Mapping[str, Any]], **options: Any) -> Conversation:
    made: list[Message] = []
    for at, one in enumerate(messages):
        extra = {name: value for name, value in one.items() if name not in ("role", "content")}
        made.append(Message(f"messages[{at}]", one["role"], one["content"], (), extra))
    return Conversation(messages=tuple(made), **options)


def ids_of(chat: TemplateChat, described: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    return encoder(described).encode(chat.write(conversation(messages, **options)).parts)


def reference_ids(
    text: str, described: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str] = NAMES, **options: Any
) -> list[int]:
    """By `transformers`."""
    tokenizer = _reference(described, tuple(names.items()))
    how = {"tokenize": True, "return_dict": True, "add_generation_prompt": True} | options
    return list(tokenizer.apply_chat_template(list(messages), chat_template=text, **how)["input_ids"])


@lru_cache
def _reference(described: str, names: tuple[tuple[str, str], ...]) -> Any:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(described), **dict(names))
