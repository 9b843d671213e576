"""The vocabulary in the metadata of a GGUF file as a tokenizer of the `tokenizers` package.

Two kinds are known: byte-level BPE (`gpt2`), whose file names the way in which a text is first cut into words, and the
BPE of sentencepiece (`llama`), whose merges follow from scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kestrel.errors import CheckpointError, shown
from kestrel.models.gguf.header import GgufHeader

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BLANK = "\u2581"
"""How sentencepiece writes a blank."""


@dataclass(frozen=True, slots=True)
class Words:
    """How one kind of byte-level vocabulary cuts a text before it looks for tokens."""

    patterns: tuple[str, ...]
    """Each cuts what the one before it left."""
    takes_whole_words: bool = False
    """A word that is a token is one, whatever the merges say."""
    opens_texts: bool = False
    """Whether texts begin with the start id where the file does not say."""
    is_composed: bool = False
    """Texts are put into Unicode's form C first."""


_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = (
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_llama3 = Words((_LLAMA3,), takes_whole_words=True, opens_texts=True)
WORDS = {
    "gpt-2": Words((_GPT2,)),
    "mpt": Words((_GPT2,)),
    "smollm": Words((r"\p{N}", _GPT2)),
    "starcoder": Words((r"\p{N}", _GPT2)),
    "refact": Words((r"\p{N}", _GPT2)),
    "command-r": Words((r"\p{N}", _GPT2)),
    "falcon": Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "smaug-bpe": Words((_LLAMA3,)),
    "qwen2": Words((_QWEN2,), is_composed=True),
    "deepseek-r1-qwen": Words((_QWEN2,)),
    "qwen35": Words((_QWEN35,)),
    "tekken": Words((_TEKKEN,), takes_whole_words=True, opens_texts=True),
    "deepseek-coder": Words(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
}
"""By `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class TokenTypes:
    """What kinds of entries a vocabulary has besides plain ones, by id."""

    controls: dict[int, str] = field(default_factory=dict)
    """A text never holds them."""
    user_defined: dict[int, str] = field(default_factory=dict)
    """Texts that are one token wherever they stand."""


def read_tokenizer(path: Path) -> Tokenizer:
    return build_tokenizer(GgufHeader.read(path))


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    kind = header.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.refusal("tokenizer.ggml.model", "supported are gpt2 (byte-level) and llama (sentencepiece)")
    if header.flag("tokenizer.ggml.add_eos_token", False):
        raise header.refusal(
            "tokenizer.ggml.add_eos_token", "a model that wants an end id after texts is not supported"
        )
    types = token_types(header)
    try:
        found = _byte_level(header) if kind == "gpt2" else _sentencepiece(header)
        found.add_special_tokens([_added(text, special=True) for text in types.controls.values()])
        found.add_tokens([_added(text, special=False) for text in types.user_defined.values()])
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{header.path}: its vocabulary is damaged ({error}); download it again") from error
    _require_apart(header, found, types.controls)
    start = token_id(header, "bos")
    if start is not None and header.flag("tokenizer.ggml.add_bos_token", _opens_texts(header)):
        name = header.texts("tokenizer.ggml.tokens")[start]
        found.post_processor = processors.TemplateProcessing(single=[name, "$A"], special_tokens=[(name, start)])  # type: ignore[assignment]
    return found


def _require_apart(header: GgufHeader, tokenizer: Tokenizer, controls: dict[int, str]) -> None:
    """Refuses a vocabulary in which the name of a control token, as a text, is that token. Any text may be unknown."""
    unknown = getattr(tokenizer.model, "unk_token", None)
    tokenizer.encode_special_tokens = True
    for each, text in controls.items():
        if text != unknown and each in tokenizer.encode(text, add_special_tokens=False).ids:
            raise CheckpointError(
                f"{header.path}: texts of users could become the control token {shown(text)}; use another file"
            )


def token_types(header: GgufHeader) -> TokenTypes:
    """Where a file does not give them, all entries are plain."""
    key = "tokenizer.ggml.token_type"
    tokens = header.texts("tokenizer.ggml.tokens")
    types = header.counts(key) if key in header.values else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {key} has {len(types)} entries for {len(tokens)} tokens; download it again"
        )
    found = TokenTypes()
    for each, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _UNKNOWN):
            found.controls[each] = text
        elif kind == _USER_DEFINED:
            found.user_defined[each] = text
    return found


def token_id(header: GgufHeader, name: str) -> int | None:
    """The id that the file gives a role, such as bos or eos."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in header.values:
        return None
    found = header.count(key)
    if found >= len(header.texts("tokenizer.ggml.tokens")):
        raise header.refusal(key, "the vocabulary has no such id; download the file again")
    return found


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


def _vocabulary(header: GgufHeader) -> dict[str, int]:
    return {text: each for each, text in enumerate(header.texts("tokenizer.ggml.tokens"))}


# ---------------------------------------------------------------------- byte-level


def _byte_level(header: GgufHeader) -> Tokenizer:
    words = _words(header)
    merges = [_two_parts(header, merge) for merge in header.texts("tokenizer.ggml.merges")]
    found = Tokenizer(models.BPE(_vocabulary(header), merges, ignore_merges=words.takes_whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of_words])  # type: ignore[assignment]
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if words.is_composed:
        found.normalizer = normalizers.NFC()  # type: ignore[assignment]
    return found


def _words(header: GgufHeader) -> Words:
    name = header.text("tokenizer.ggml.pre")
    if name not in WORDS:
        raise header.refusal(
            "tokenizer.ggml.pre", f"supported are: {', '.join(WORDS)}; a wrong one would give wrong ids"
        )
    return WORDS[name]


def _two_parts(header: GgufHeader, merge: str) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not (left and blank and right):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.merges holds {shown(merge)}, not two parts; download it again"
        )
    return left, right


def _opens_texts(header: GgufHeader) -> bool:
    return header.text("tokenizer.ggml.model") == "llama" or _words(header).opens_texts


# ---------------------------------------------------------------------- sentencepiece


def _sentencepiece(header: GgufHeader) -> Tokenizer:
    unknown = token_id(header, "unknown")
    tokens = header.texts("tokenizer.ggml.tokens")
    found = Tokenizer(
        models.BPE(
            _vocabulary(header),
            _merges_by_score(header),
            unk_token="<unk>" if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_blank = header.flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(_BLANK)] if has_blank else []
    found.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _BLANK)])  # type: ignore[assignment]
    after = [decoders.Strip(" ", 1, 0)] if has_blank else []
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    found.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return found


def _merges_by_score(header: GgufHeader) -> list[tuple[str, str]]:
    """Every way to make a piece of two others; pieces of higher scores are made first."""
    ids, scores = _vocabulary(header), header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(header.texts("tokenizer.ggml.tokens")):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.scores has {len(scores)} entries; download it again")
    special = token_types(header).controls
    merges = [
        (-scores[whole], ids[text[:cut]], ids[text[cut:]])
        for text, whole in ids.items()
        if whole not in special
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    names = {each: text for text, each in ids.items()}
    return [(names[left], names[right]) for _, left, right in sorted(merges)]
