"""Writes a GGUF file's tokenizer as the files that Hugging Face tokenizers are loaded from.

Owns what GGUF leaves unsaid: it names a pre-tokenizer ("qwen2") where tokenizer.json spells out its regular expression,
and holds SentencePiece scores where tokenizer.json holds merges. Needs only the standard library.
`raytp.gguf_checkpoint` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from workers.errors import UnsupportedModelError


class Metadata(Protocol):
    """What is needed of an open GGUF file."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def has(self, key: str) -> bool: ...


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as llama.h numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How one named pre-tokenizer cuts text into words before byte pairs are merged."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    """Whether a BOS is put in front where the file does not say."""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(num_digits: str) -> tuple[dict[str, Any], ...]:
    """The expression that Llama 3 and Qwen 2 share but for how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + num_digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return split, _byte_level(use_regex=False)


_GPT2 = _PreTokenizer(steps=(_byte_level(use_regex=True),))
_SMOLLM = _PreTokenizer(steps=({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_QWEN2 = _PreTokenizer(steps=_split_then_bytes(""), normalizer={"type": "NFC"})
_LLAMA3 = _PreTokenizer(steps=_split_then_bytes("{1,3}"), ignore_merges=True, add_bos=True)

_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
}


def write_tokenizer(file: Metadata, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja (if there is a template) into `target`.

    Raises:
        UnsupportedModelError: the kind of tokenizer, or its pre-tokenizer, is not known.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _build_byte_level_bpe(file)
    elif kind == "llama":
        tokenizer = _build_sentencepiece_bpe(file)
    else:
        raise UnsupportedModelError(f"tokenizer {kind!r} in the GGUF file; supported are gpt2 and llama")
    _write_json(target / "tokenizer.json", tokenizer)
    _write_json(target / "tokenizer_config.json", _build_tokenizer_config(file))
    if file.has("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(file.get("tokenizer.chat_template"), encoding="utf-8")


def _build_byte_level_bpe(file: Metadata) -> dict[str, Any]:
    name = file.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r} in the GGUF file; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges")]
    return _build_tokenizer(
        file,
        model=_build_bpe(file, merges) | {"ignore_merges": pre_tokenizer.ignore_merges},
        normalizer=pre_tokenizer.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)},
        decoder=_byte_level(use_regex=True),
        add_bos=pre_tokenizer.add_bos,
    )


def _build_sentencepiece_bpe(file: Metadata) -> dict[str, Any]:
    """Byte pairs over the text itself, spaces as U+2581; characters that no token holds fall back to byte tokens."""
    add_prefix_space = file.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = _derive_merges(file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.scores"))
    unknown = {"unk_token": _get_token(file, "unknown"), "fuse_unk": True, "byte_fallback": True}
    return _build_tokenizer(
        file,
        model=_build_bpe(file, merges) | unknown,
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first" if add_prefix_space else "never",
            "split": False,
        },
        decoder={"type": "Sequence", "decoders": steps},
        add_bos=True,
    )


def _derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Every way to make a token of two others, best score of the result first, then lowest ids of the parts."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right]))
    return [[tokens[left], tokens[right]] for _, left, right in sorted(merges)]


def _build_bpe(file: Metadata, merges: list[list[str]]) -> dict[str, Any]:
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    num_tokens = len(tokens)
    while types[num_tokens - 1] == _TokenType.UNUSED:  # rows that only pad the embedding
        num_tokens -= 1
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens[:num_tokens])},
        "merges": merges,
    }


def _build_tokenizer(
    file: Metadata,
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    add_bos: bool,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added_tokens(file),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _build_post_processor(file, file.get("tokenizer.ggml.add_bos_token", add_bos)),
        "decoder": decoder,
        "model": model,
    }


def _list_added_tokens(file: Metadata) -> list[dict[str, Any]]:
    """Tokens matched in the text before it is cut: control tokens, which decoding leaves out, and user-defined ones."""
    special = {_TokenType.CONTROL: True, _TokenType.UNKNOWN: True, _TokenType.USER_DEFINED: False}
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special[token_type],
        }
        for i, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in special
    ]


def _build_post_processor(file: Metadata, add_bos: bool) -> dict[str, Any] | None:
    bos = _get_token(file, "bos")
    if not add_bos or bos is None:
        return None
    bos_piece = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos_piece, first],
        "pair": [bos_piece, first, second],
        "special_tokens": {bos: {"id": bos, "ids": [file.get("tokenizer.ggml.bos_token_id")], "tokens": [bos]}},
    }


def _build_tokenizer_config(file: Metadata) -> dict[str, Any]:
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: _get_token(file, kind) for name, kind in named.items()},
    }


def _get_token(file: Metadata, kind: str) -> str | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    return file.get("tokenizer.ggml.tokens")[file.get(key)] if file.has(key) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
