"""Converts a GGUF file of a Llama, Qwen2 or Qwen3 model into a Hugging Face directory.

Owns the GGUF names of tensors and metadata; `raytp.gguf_tokenizer` writes the tokenizer's files. Reads with the `gguf`
package, one tensor at a time, and needs neither torch nor transformers. Must not know where the directory is kept:
`raytp.model_source` calls it, and caches the result. Names and permutations follow llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from raytp.gguf_tokenizer import write_tokenizer
from raytp.outputs import ProgressCallback
from workers.errors import UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class GgufFile:
    """An open GGUF file: its metadata by key, and its tensors.

    Raises:
        UnsupportedModelError: it cannot be read, is one part of several, or is of another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise UnsupportedModelError(f"{path} is not a complete GGUF file ({error}): download it again") from error
        if (num_parts := self.get("split.count", 1)) > 1:
            raise UnsupportedModelError(f"{path} is one of {num_parts} parts: join them with llama-gguf-split --merge")
        self.architecture: str = self.get("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path} holds a model of architecture {self.architecture!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key`. Without a default a missing key is an UnsupportedModelError."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise UnsupportedModelError(f"the GGUF file lacks {key!r}: convert it again with a newer llama.cpp")
        return default

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def get_size(self, key: str, default: int | None = None) -> int:
        """A size under the architecture's own prefix. One that differs from layer to layer is unsupported."""
        value = self.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int):
            raise UnsupportedModelError(f"{key} differs from layer to layer in this GGUF file: {value}")
        return value

    def get_float(self, key: str, default: float) -> float:
        """A float32 under the architecture's own prefix, as the shortest decimal that rounds to it (1e-05, say)."""
        return float(str(np.float32(self.get(f"{self.architecture}.{key}", default))))


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the checkpoint to be written."""

    name: str
    source: ReaderTensor
    num_rotary_heads: int
    """Heads whose rows llama.cpp has interleaved, 0 if it left them alone."""

    @property
    def shape(self) -> list[int]:
        return [int(size) for size in reversed(self.source.shape)]


def convert_gguf(source: Path, target: Path, on_progress: ProgressCallback | None = None) -> None:
    """Write config, generation config, tokenizer and weights of the GGUF file `source` into the directory `target`.

    Matrices that are quantized in the file become bfloat16; float32, float16 and bfloat16 stay what they are.

    Raises:
        UnsupportedModelError: the file is damaged, or its architecture, rope scaling or tokenizer is not supported.
    """
    file = GgufFile(source)
    config = _build_config(file)
    targets = _list_targets(file, config)
    target.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file, target)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _build_generation_config(file))
    _write_safetensors(target / "model.safetensors", targets, config["dtype"], f"Converting {source.name}", on_progress)


def _build_config(file: GgufFile) -> dict[str, Any]:
    hidden_size = file.get_size("embedding_length")
    num_heads = file.get_size("attention.head_count")
    head_dim = file.get_size("attention.key_length", hidden_size // num_heads)
    _refuse_unknown_features(file, head_dim)
    return {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "attention_bias": file.architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": _get_token_id(file, "bos"),
        "dtype": _choose_dtype(file),
        "eos_token_id": _get_token_id(file, "eos"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.get_size("feed_forward_length"),
        "max_position_embeddings": file.get_size("context_length"),
        "num_attention_heads": num_heads,
        "num_hidden_layers": file.get_size("block_count"),
        "num_key_value_heads": file.get_size("attention.head_count_kv", num_heads),
        "rms_norm_eps": file.get_float("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _build_rope_parameters(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
    }


def _refuse_unknown_features(file: GgufFile, head_dim: int) -> None:
    if (num_experts := file.get_size("expert_count", 0)) > 0:
        raise UnsupportedModelError(f"the GGUF file holds a mixture of {num_experts} experts: only dense models run")
    for key in ("rope.dimension_count", "attention.value_length"):
        if (size := file.get_size(key, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{key} is {size} in the GGUF file, and its head size {head_dim}: not supported"
            )


def _build_generation_config(file: GgufFile) -> dict[str, Any]:
    """Ends of a text, of a turn and of a message all end an answer."""
    ends = [_get_token_id(file, kind) for kind in ("eos", "eot", "eom")]
    return {
        "bos_token_id": _get_token_id(file, "bos"),
        "eos_token_id": sorted({token_id for token_id in ends if token_id is not None}),
        "pad_token_id": _get_token_id(file, "padding"),
    }


def _get_token_id(file: GgufFile, kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    return int(file.get(key)) if file.has(key) else None


def _choose_dtype(file: GgufFile) -> str:
    matrix_types = {tensor.tensor_type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if matrix_types == {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if matrix_types == {GGMLQuantizationType.F16} else "bfloat16"


def _build_rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = file.get_float("rope.freq_base", 10000.0)
    if _ROPE_FACTORS in file.tensors:
        return _recover_llama3_rope(file, theta, head_dim)
    rope_type = file.get(f"{file.architecture}.rope.scaling.type", "none")
    if rope_type == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = file.get_float("rope.scaling.factor", 1.0)
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": theta, "factor": factor}
    if rope_type == "linear":
        return parameters
    if rope_type != "yarn":
        raise UnsupportedModelError(f"rope scaling type {rope_type!r} in the GGUF file; supported are linear and yarn")
    # llama.cpp multiplies YaRN's own attention factor by the file's.
    attention_factor = file.get_float("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor))
    return parameters | {
        "original_max_position_embeddings": file.get_size("rope.scaling.original_context_length"),
        "attention_factor": attention_factor,
        "beta_fast": file.get_float("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.get_float("rope.scaling.yarn_beta_slow", 1.0),
    }


def _recover_llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.x files hold the divisor of each frequency, (D/2,), but not the parameters it was computed from.

    The largest divisor is the factor; the others are the same in every published Llama 3.1 to 3.3. That the divisors
    follow from them is checked.
    """
    divisors = _read_float32(file.tensors[_ROPE_FACTORS])
    factor, low, high, original_length = float(divisors.max()), 1.0, 4.0, 8192
    turns = original_length * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if divisors.shape != turns.shape or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModelError(
            f"the GGUF file's {_ROPE_FACTORS} are not those of Llama 3: load the model's safetensors instead"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original_length,
    }


def _list_targets(file: GgufFile, config: dict[str, Any]) -> list[_Target]:
    # Only for the Llama family does llama.cpp interleave the two rotary halves of each head.
    rotary_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    targets = []
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        part, layer, kind = _split_name(name)
        heads = rotary_heads.get(part, 0) if file.architecture == "llama" else 0
        prefix = _TOP_LEVEL[part] if layer is None else f"model.layers.{layer}.{_OF_LAYER[part]}"
        targets.append(_Target(f"{prefix}.{kind}", tensor, heads))
    return targets


def _split_name(name: str) -> tuple[str, int | None, str]:
    """`blk.3.attn_q.weight` to ("attn_q", 3, "weight"), `output.weight` to ("output", None, "weight")."""
    match name.split("."):
        case [part, "weight" as kind] if part in _TOP_LEVEL:
            return part, None, kind
        case ["blk", layer, part, "weight" | "bias" as kind] if part in _OF_LAYER:
            return part, int(layer), kind
    raise UnsupportedModelError(f"the GGUF file holds a tensor {name!r}, which none of {', '.join(ARCHITECTURES)} has")


def _read_float32(tensor: ReaderTensor) -> NDArray[np.float32]:
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _separate_rotary_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """(H*D, ...) with the two rotary halves of each head interleaved to (H*D, ...) with one after the other."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.asarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _encode(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The bit patterns of `values` in `dtype`; bfloat16, which numpy lacks, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded >> np.uint32(16), dtype=np.uint16)


def _write_safetensors(
    path: Path, targets: list[_Target], dtype: str, description: str, on_progress: ProgressCallback | None
) -> None:
    """Write tensor after tensor, so that only one is in memory. The format: length of the header, header, data."""
    item_size = 4 if dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    num_bytes = 0
    for target in targets:
        begin, num_bytes = num_bytes, num_bytes + math.prod(target.shape) * item_size
        offsets = [begin, num_bytes]
        header[target.name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": target.shape, "data_offsets": offsets}
    encoded_header = json.dumps(header).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    with open(path, "wb") as out:
        out.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for target in targets:
            values = _read_float32(target.source)
            if target.num_rotary_heads:
                values = _separate_rotary_halves(values, target.num_rotary_heads)
            out.write(_encode(values, dtype).tobytes())
            if on_progress:
                on_progress(description, header[target.name]["data_offsets"][1] / num_bytes)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
