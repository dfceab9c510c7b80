"""Tokenizers of converted GGUF files against transformers: the same ids of the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaTokenizer, Qwen2Tokenizer, Qwen3Config

from raytp.gguf_checkpoint import convert_gguf
from tests.orchestration.gguf_files import CONFIGS, HEADS, SIZES, TINY, FileBuilder, random_model, rope, tiny_vocabulary

TEXTS = [
    "Hello, world!",
    "It's 12345 o'clock\n\n  and  I'm late.",
    "naïve café 東京 😀🏳️‍🌈",
    "\tdef f(x):\r\n    return x",
    "",
]


def convert_tokenizer(tmp_path: Path, **options: Any) -> Any:
    model = random_model(CONFIGS["qwen3"])
    builder = FileBuilder(tmp_path / "model.gguf", "qwen3")
    builder.add_config(model.config)
    builder.add_tokenizer(**options)
    builder.add_weights(model)
    convert_gguf(builder.write(), tmp_path / "hf")
    return AutoTokenizer.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_tokenizer_equals_the_original(tmp_path: Path, text: str) -> None:
    tokenizer = convert_tokenizer(tmp_path)
    chat = f"<|im_start|>user\n{text}<|im_end|>"
    assert tokenizer.encode(chat) == RawTokenizer.from_file(str(TINY / "tokenizer.json")).encode(chat).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_tokenizer_equals_that_of_transformers(tmp_path: Path, text: str) -> None:
    vocabulary = tiny_vocabulary()
    expected = Qwen2Tokenizer(vocab=vocabulary["vocab"], merges=[tuple(merge) for merge in vocabulary["merges"]])
    assert convert_tokenizer(tmp_path, pre="qwen2").encode(text) == expected.encode(text)


@pytest.mark.parametrize(
    ("pre", "add_bos", "num_bos"),
    [("gpt-2", None, 0), ("gpt-2", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, 0)],
)
def test_bos_is_added_as_the_file_says(tmp_path: Path, pre: str, add_bos: bool | None, num_bos: int) -> None:
    tokenizer = convert_tokenizer(tmp_path, pre=pre, add_bos=add_bos)
    assert tokenizer.encode("Hello").count(1) == num_bos
    assert tokenizer.encode("Hello", add_special_tokens=False).count(1) == 0


def test_llama3_tokenizer_keeps_three_digits_together(tmp_path: Path) -> None:
    pieces = convert_tokenizer(tmp_path, pre="llama-bpe").backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1234567")
    assert [piece for piece, _ in pieces] == ["a", "123", "456", "7"]


def test_padding_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES | {"vocab_size": 2064}, **HEADS, **rope(), head_dim=32)
    builder = FileBuilder(tmp_path / "model.gguf", "qwen3")
    builder.add_config(config)
    builder.add_tokenizer(num_unused=16)
    builder.add_weights(random_model(config))
    convert_gguf(builder.write(), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 2064
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == 2048


def test_every_end_token_ends_generation(tmp_path: Path) -> None:
    convert_tokenizer(tmp_path)
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


SENTENCEPIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]


@pytest.mark.parametrize("text", ["hello hello", " lo  hell", "né 😀 hello", "h\n"])
def test_sentencepiece_tokenizer_equals_that_of_transformers(tmp_path: Path, text: str) -> None:
    words = ["▁", "h", "e", "l", "o", "ll", "▁h", "he", "▁he", "llo", "hello", "▁hello", "lo", "▁lo"]
    tokens = SENTENCEPIECES + words
    scores = [0.0] * len(SENTENCEPIECES) + [-1e9] * 5 + [float(-i) for i in range(len(words) - 5)]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    config = LlamaConfig(**SIZES | {"vocab_size": len(tokens)}, **HEADS, **rope())
    builder = FileBuilder(tmp_path / "model.gguf", "llama")
    builder.add_config(config)
    builder.writer.add_tokenizer_model("llama")
    builder.writer.add_token_list(tokens)
    builder.writer.add_token_scores(scores)
    builder.writer.add_token_types(types)
    builder.writer.add_unk_token_id(0)
    builder.writer.add_bos_token_id(1)
    builder.writer.add_eos_token_id(2)
    builder.add_weights(random_model(config))
    convert_gguf(builder.write(), tmp_path / "hf")
    merges = [("l", "l"), ("▁", "h"), ("h", "e"), ("▁", "he"), ("▁h", "e"), ("ll", "o"), ("l", "lo"), ("he", "llo")]
    merges += [("▁", "hello"), ("▁he", "llo"), ("l", "o"), ("▁", "lo")]
    expected = LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.encode(text)
    assert ids == [1, *expected.encode(text, add_special_tokens=False)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
