"""One rank's model runner under the real scheduler, in this process: it knows the trivia model's answers.

On a GPU with every backend, with and without CUDA graphs, for any number of sequences; on a CPU with plain torch.
"""

from __future__ import annotations

import collections
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from scheduler.config import SchedulerConfig
from scheduler.sampling_params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step import Step
from scheduler.updates import SequenceUpdate
from workers.batch import Batch
from workers.config import WorkerConfig
from workers.device_memory import largest_step
from workers.model_runner import ModelRunner, StepOutcome
from workers.parallel import TensorParallel

TRIVIA = Path(__file__).parents[1] / "models" / "tiny-qwen3-trivia"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
EOS_IDS = (0, 2)
CONFIG = WorkerConfig(
    model_path=str(TRIVIA),
    world_size=1,
    device=DEVICE.type,
    dtype="bfloat16" if ON_GPU else "float32",
    load_format="auto",
    attention_backend="auto",
    enforce_eager=False,
    block_size=16,
    num_kv_blocks=600,
    memory_fraction=0.5,
    cpu_kv_cache_bytes=0,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    max_model_len=512,
    num_valid_tokens=None,
    num_threads=1,
    timeout_s=60,
)


def load_questions(count: int) -> list[tuple[list[int], str]]:
    """(prompt token ids, answer) of the first questions."""
    tokenizer = Tokenizer.from_file(str(TRIVIA / "tokenizer.json"))
    pairs = json.loads((TRIVIA / "questions.json").read_text())[:count]
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [
        (tokenizer.encode(template.format(pair["question"]), add_special_tokens=False).ids, pair["answer"])
        for pair in pairs
    ]


def run(config: WorkerConfig, prompts: list[list[int]], logprobs: int | None = None) -> dict[int, list[SequenceUpdate]]:
    """Every update of each prompt, of a new runner."""
    return serve(*start(config), config, prompts, logprobs)


def start(config: WorkerConfig) -> tuple[ModelRunner, int]:
    """A runner that is ready for steps, and its number of blocks."""
    runner = ModelRunner(config, TensorParallel.single(), DEVICE)
    num_kv_blocks = runner.load(lambda fraction: None).num_kv_blocks
    runner.allocate(num_kv_blocks, lambda fraction: None)
    return runner, num_kv_blocks


def serve(
    runner: ModelRunner,
    num_kv_blocks: int,
    config: WorkerConfig,
    prompts: list[list[int]],
    logprobs: int | None = None,
) -> dict[int, list[SequenceUpdate]]:
    """Every update of each prompt, decoded greedily one step ahead."""
    limits = SchedulerConfig(
        num_kv_blocks=num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=2048,
    )
    scheduler = Scheduler(limits)
    sampling = ResolvedSampling(max_tokens=60, stop_token_ids=EOS_IDS, logprobs=logprobs)
    for index, prompt in enumerate(prompts):
        scheduler.add(Sequence(index, np.array(prompt, dtype=np.int32), sampling))
    outcomes: collections.deque[StepOutcome] = collections.deque()
    updates: dict[int, list[SequenceUpdate]] = {index: [] for index in range(len(prompts))}
    while scheduler.has_unfinished or outcomes:
        step = scheduler.schedule()
        if step is not None:
            outcome = runner.execute(step)
            assert outcome is not None
            outcomes.append(outcome)
        if len(outcomes) == 2 or (step is None and outcomes):
            scheduler.postprocess(outcomes.popleft().wait())
        for update in scheduler.take_updates():
            updates[update.seq_id].append(update)
    return updates


def assert_knows_the_answers(config: WorkerConfig, num_questions: int) -> None:
    questions = load_questions(num_questions)
    tokenizer = Tokenizer.from_file(str(TRIVIA / "tokenizer.json"))
    updates = run(config, [prompt for prompt, _ in questions])
    answers = [tokenizer.decode([u.token_id for u in updates[i] if u.token_id]) for i in range(len(questions))]
    assert [answer.strip() for answer in answers] == [answer for _, answer in questions]


def test_the_default_backend_knows_the_answers() -> None:
    assert_knows_the_answers(CONFIG, 271 if ON_GPU else 40)


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ((8192, 256, 4096), [4096, 4096]),
        ((8192, 256, 5000), [5000, 3192]),
        ((8192, 256, 40960), [8192]),
        ((8192, 3, 1000), [1000, 1000, 1000]),
        ((1, 1, 1), [1]),
    ],
)
def test_the_step_that_memory_is_kept_for_is_the_largest_that_can_be(
    limits: tuple[int, int, int], lengths: list[int]
) -> None:
    assert largest_step(*limits) == lengths


def test_loading_is_done_also_where_there_is_nothing_to_read() -> None:
    seen: list[float] = []
    ModelRunner(replace(CONFIG, load_format="dummy"), TensorParallel.single(), DEVICE).load(seen.append)
    assert seen == [1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_backend_knows_the_answers(backend: str, dtype: str) -> None:
    assert_knows_the_answers(replace(CONFIG, attention_backend=backend, dtype=dtype), 271)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_flash_attn_2_knows_the_answers() -> None:
    pytest.importorskip("flash_attn")
    assert_knows_the_answers(replace(CONFIG, attention_backend="flash_attn", block_size=256, num_kv_blocks=64), 271)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 20, 100, 512])
def test_graphs_of_any_number_of_sequences(max_num_seqs: int) -> None:
    assert_knows_the_answers(replace(CONFIG, max_num_seqs=max_num_seqs, num_kv_blocks=2000), 271)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_graphs_and_eager_agree_to_rounding() -> None:
    prompts = [prompt for prompt, _ in load_questions(64)]
    graphs, eager = (run(replace(CONFIG, enforce_eager=is_eager), prompts, logprobs=2) for is_eager in (False, True))
    assert_agree_to_rounding(graphs, eager)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("max_num_seqs", [2, 32])
@pytest.mark.parametrize("max_num_batched_tokens", [100, 4096])
def test_captured_and_eager_prompts_agree(
    max_num_seqs: int, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prompts that share blocks, and decoding rows beside them, in steps that are padded and in full ones."""
    from workers.prefill_graph import PrefillGraphs

    captured_lengths = []

    def run_captured(graphs: PrefillGraphs, batch: Batch, num_shared_blocks: int) -> Tensor:
        captured_lengths.append(len(batch.input_ids))
        return original(graphs, batch, num_shared_blocks)

    original = PrefillGraphs.run
    monkeypatch.setattr(PrefillGraphs, "run", run_captured)
    questions = [prompt for prompt, _ in load_questions(40)]
    lengths = [16, 17, 32, 33, 100, 101, 129, 255, 256, 300, 384, 400, *[450] * 12]
    prompts = [list(itertools.chain(*questions[: length // 4]))[-length:] for length in lengths] + questions
    config = replace(
        CONFIG,
        dtype="float32",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=1200,
    )
    captured = run(config, prompts, logprobs=2)
    num_captured = len(captured_lengths)
    assert num_captured > 5
    eager = run(replace(config, enforce_eager=True), prompts, logprobs=2)
    assert len(captured_lengths) == num_captured
    assert_agree_to_rounding(captured, eager, tolerance=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("max_num_seqs", [2, 20, 32])
def test_a_shared_prefix_that_is_read_once_gives_the_same(max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that come and go, and others that do not begin so."""
    from workers import shared_blocks

    questions = [prompt for prompt, _ in load_questions(70)]
    system = list(itertools.chain(*questions[:20]))[:330]
    prompts = [system + question for question in questions]
    prompts += [system[:200] + question for question in questions[:40]] + questions[:3]
    config = replace(CONFIG, dtype="float32", max_num_seqs=max_num_seqs, num_kv_blocks=2000)
    apart = run(config, prompts, logprobs=2)
    monkeypatch.setattr(shared_blocks, "_MIN_SPARED_BYTES", 1)
    counts: collections.Counter[int] = collections.Counter()

    def count(blocks: shared_blocks.SharedBlocks, step: Step) -> int:
        num_blocks = original(blocks, step)
        counts[num_blocks] += 1
        return num_blocks

    original = shared_blocks.SharedBlocks.count
    monkeypatch.setattr(shared_blocks.SharedBlocks, "count", count)
    together = run(config, prompts, logprobs=2)
    assert counts[20] > 20
    assert counts[12] > 0
    assert counts[0] > 0
    assert_agree_to_rounding(together, apart, tolerance=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_own_linear_layers_agree_with_torch_to_rounding(
    max_num_seqs: int, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.kernels import fused, reference_ops

    prompts = [prompt for prompt, _ in load_questions(24)]
    config = replace(CONFIG, max_num_seqs=max_num_seqs, enforce_eager=enforce_eager)
    own = run(config, prompts, logprobs=2)
    monkeypatch.setattr(fused, "linear", reference_ops.linear)
    monkeypatch.setattr(fused, "gated_linear", reference_ops.gated_linear)
    assert_agree_to_rounding(own, run(config, prompts, logprobs=2))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_linear_layer_is_compiled_while_serving(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from workers.kernels import fused, gemv, skinny_linear

    for kernel in (gemv._gemv_kernel, skinny_linear._skinny_linear_kernel, fused._rms_norm_kernel):
        kernel.device_caches.clear()  # of what other tests have compiled
    modules = {module.__name__ for module in (gemv, skinny_linear, fused)}
    config = replace(CONFIG, enforce_eager=enforce_eager)
    runner, num_kv_blocks = start(config)
    compiled: list[str] = []

    def note(**call: Any) -> None:
        if call["fn"].module in modules:
            compiled.append(call["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for length in (1, 2, 3, 8, 9):
        for num_prompts in (1, 2, 7):
            serve(runner, num_kv_blocks, config, [list(range(5, 5 + length))] * num_prompts)
    assert not compiled


def assert_agree_to_rounding(
    first: dict[int, list[SequenceUpdate]], second: dict[int, list[SequenceUpdate]], tolerance: float = 0.1
) -> None:
    """Same tokens, and log probabilities that differ by what rounding, by default to bf16, loses in a few layers."""
    assert first.keys() == second.keys()
    for index in first:
        for a, b in zip(first[index], second[index], strict=True):
            assert a.token_id == b.token_id
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert abs(a.logprobs.chosen - b.logprobs.chosen) < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_pool_that_cannot_fit_says_what_would() -> None:
    from workers.errors import KVCacheMemoryError

    with pytest.raises(KVCacheMemoryError, match="raise memory_fraction"):
        run(replace(CONFIG, num_kv_blocks=None, memory_fraction=0.0001), [[1, 2, 3]])
