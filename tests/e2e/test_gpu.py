"""The whole engine on real GPUs: against transformers in float32, and on two ranks against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import raytp.bench
from raytp import LLM, RequestOutput, SamplingParams
from tests.e2e.checkpoints import TRIVIA, questions, save_random

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = [[(7 * i + 3 * j) % 251 for j in range(5 + 9 * i)] for i in range(6)]
MEMORY_FRACTION = 0.2
CHATS = [[{"role": "user", "content": question}] for question, _ in questions()]

pytestmark = [pytest.mark.usefixtures("ray_session")]


def answers(llm: LLM) -> int:
    """How many trivia questions it answers word for word."""
    outputs = llm.chat(CHATS, SamplingParams(max_tokens=100))
    return sum(output.text == answer for output, (_, answer) in zip(outputs, questions(), strict=True))


@pytest.mark.gpu
@ON_GPU
def test_greedy_ids_in_float32_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_random(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        expected.append(generated[0, len(prompt) :].tolist())
    del model
    with LLM(path, dtype="float32", memory_fraction=MEMORY_FRACTION) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected


def logprobs(**options: Any) -> list[RequestOutput]:
    with LLM(TRIVIA, memory_fraction=MEMORY_FRACTION, **options) as llm:
        return llm.chat(CHATS[:64], SamplingParams(temperature=0, max_tokens=20, logprobs=3))


def assert_equal_to_rounding(ours: list[RequestOutput], others: list[RequestOutput]) -> None:
    """Same tokens, and log probabilities that differ by what bf16 loses in a few layers."""
    for one, other in zip(ours, others, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True):
            assert abs(a.chosen - b.chosen) < 0.1


@pytest.mark.gpu2
@ON_TWO_GPUS
def test_one_and_two_ranks_agree_to_rounding() -> None:
    one, two = logprobs(), logprobs(tensor_parallel_size=2)
    assert_equal_to_rounding(one, two)
    assert_equal_to_rounding(two, logprobs(tensor_parallel_size=2, enforce_eager=True))


@pytest.mark.gpu2
@ON_TWO_GPUS
def test_ranks_with_unequal_free_memory_agree_on_the_pool() -> None:
    """Another process holds 4 GB of the second GPU."""
    held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda:1")
    with LLM(TRIVIA, tensor_parallel_size=2, memory_fraction=MEMORY_FRACTION) as llm:
        limited = llm.info.num_kv_blocks
        assert answers(llm) == len(questions())
    del held
    torch.cuda.empty_cache()
    with LLM(TRIVIA, tensor_parallel_size=2, memory_fraction=MEMORY_FRACTION) as llm:
        assert llm.info.num_kv_blocks > limited


@pytest.mark.gpu
@ON_GPU
def test_a_full_step_that_asks_for_every_filter_fits_beside_the_pool() -> None:
    """With a real vocabulary, and next to no memory left over that nobody has counted."""
    shape = Path(raytp.bench.__file__).parent / "shapes" / "qwen3-0.6b"
    everything = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=20,
        max_tokens=4,
        ignore_eos=True,
    )
    with LLM(shape, load_format="dummy", memory_fraction=0.99, max_num_seqs=256, max_model_len=4096) as llm:
        outputs = llm.generate([[7 * i + 1, 3, 5] for i in range(256)], everything)
    assert {len(output.token_ids) for output in outputs} == {4}


@pytest.mark.gpu2
@ON_TWO_GPUS
def test_a_rank_that_loads_holds_no_more_of_its_host_than_its_shard(tmp_path: Path) -> None:
    """A checkpoint that is larger than a shard and the allowed 1 GB together."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    checkpoint_bytes = sum(parameter.nbytes for parameter in model.parameters())
    del model
    torch.cuda.empty_cache()
    with LLM(tmp_path, tensor_parallel_size=2, dtype="bfloat16", memory_fraction=MEMORY_FRACTION) as llm:
        info = llm.info
    print(f"shard {info.weight_bytes / 2**30:.2f} GiB, of the host at most {info.peak_host_bytes / 2**30:.2f} GiB")
    assert info.peak_host_bytes < info.weight_bytes + 2**30 < checkpoint_bytes
