"""Whatever the limits, the order of events and the sharing: invariants hold after every operation, nothing spins, and
every sequence gets the tokens that it would have got alone."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.block_manager import BlockManager, hash_block
from scheduler.config import SchedulerConfig
from scheduler.sequence import Sequence
from tests.control_plane.fake_model import Harness, expected_tokens, make_config, make_sequence, run_all

VOCAB_SIZE = 5
"""Small, so that prompts and outputs begin alike."""


def configs(**fixed: Any) -> st.SearchStrategy[SchedulerConfig]:
    limits: dict[str, st.SearchStrategy[Any]] = {
        "num_kv_blocks": st.integers(2, 14),
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.one_of(st.integers(1, 12), st.just(64)),
        "max_model_len": st.sampled_from([16, 40]),
        "enable_prefix_caching": st.booleans(),
    }
    limits |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(SchedulerConfig, vocab_size=st.just(VOCAB_SIZE), **limits)


UNLIMITED = make_config(num_kv_blocks=99, vocab_size=VOCAB_SIZE)
TEXT = [1, *expected_tokens([1], make_sequence(0, [1], max_tokens=40).sampling, UNLIMITED)[0]]
"""What every prompt that is a beginning of it goes on with: such sequences share blocks that they generate, too."""
token_ids = st.integers(0, VOCAB_SIZE - 1)
prompts = st.one_of(
    st.lists(token_ids, min_size=1, max_size=20),
    st.integers(1, 20).map(lambda length: TEXT[:length]),
    st.integers(1, 20).map(lambda length: [0, 1, 1, 2, 0, 1, 1, 2, 3, 3, 3, 0, 1, 2, 3, 4, 0, 0, 0, 1][:length]),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (4,), (3, 4)]),
        "cache_salt": st.sampled_from(["", "", "a"]),
    }
)
hash_functions = st.sampled_from([hash_block, lambda parent, tokens: 0, lambda parent, tokens: hash(tokens) % 3])


def fitting(request: dict[str, Any], config: SchedulerConfig) -> dict[str, Any]:
    """The request, its prompt cut to what admission lets through."""
    longest = min(config.max_model_len, config.num_kv_tokens) - 1
    return request | {"prompt": request["prompt"][:longest]}


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and results in any order that the engine could produce, and some that it could not."""

    @initialize(config=configs(), hash_function=hash_functions, max_in_flight=st.integers(1, 3))
    def start(self, config: SchedulerConfig, hash_function: Any, max_in_flight: int) -> None:
        manager = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching, hash_function)
        self.harness = Harness(config, manager)
        self.max_in_flight = max_in_flight
        self.aborted: set[int] = set()
        self.convicted: set[int] = set()

    @rule(request=requests)
    def arrive(self, request: dict[str, Any]) -> None:
        self.harness.add(make_sequence(len(self.harness.stories), **fitting(request, self.harness.config)))

    @precondition(lambda self: self.harness.stories)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.harness.stories)))
        if self.harness.stories[seq_id].finish_reason is None:
            self.aborted.add(seq_id)
        self.harness.abort(seq_id)

    @precondition(lambda self: len(self.harness.results) < self.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.results)
    @rule()
    def postprocess(self) -> None:
        self.harness.postprocess()

    @rule()
    def lose_ranks(self) -> None:
        open_before = {seq_id for seq_id, story in self.harness.stories.items() if story.finish_reason is None}
        on_trial = self.harness.scheduler._suspects.on_trial
        self.harness.lose_ranks()
        convicted = {seq_id for seq_id in open_before if self.harness.stories[seq_id].finish_reason is not None}
        assert convicted <= (set() if on_trial is None else {on_trial.seq_id})
        assert all("killed" in str(self.harness.stories[seq_id].error) for seq_id in convicted)
        self.convicted |= convicted

    @rule(turns=st.integers(1, 10))
    def advance(self, turns: int) -> None:
        while len(self.harness.results) >= self.max_in_flight:
            self.harness.postprocess()
        for _ in range(turns):
            self.harness.advance(self.max_in_flight)

    @invariant()
    def aborted_sequences_have_ended(self) -> None:
        assert all(self.harness.stories[seq_id].finish_reason == "abort" for seq_id in self.aborted)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        while len(self.harness.results) >= self.max_in_flight:
            self.harness.postprocess()
        self.harness.run(self.max_in_flight)
        for seq_id, story in self.harness.stories.items():
            if seq_id in self.aborted | self.convicted:
                seq = self.harness.sequences[seq_id]
                prompt = seq.token_ids[: seq.num_prompt_tokens].tolist()
                expected, _ = expected_tokens(prompt, seq.sampling, self.harness.config)
                assert story.token_ids == expected[: len(story.token_ids)]
            else:
                self.harness.assert_as_expected(seq_id)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def _sequences(some: list[dict[str, Any]], config: SchedulerConfig) -> list[Sequence]:
    return [make_sequence(index, **fitting(request, config)) for index, request in enumerate(some)]


@settings(max_examples=100, deadline=None)
@given(
    config=configs(max_model_len=40), some=st.lists(requests, min_size=1, max_size=10), max_in_flight=st.integers(1, 3)
)
def test_everything_at_once_ends_as_if_alone(
    config: SchedulerConfig, some: list[dict[str, Any]], max_in_flight: int
) -> None:
    run_all(_sequences(some, config), config, max_in_flight=max_in_flight)


@settings(max_examples=60, deadline=None)
@given(some=st.lists(requests, min_size=2, max_size=8), block_size=st.sampled_from([1, 2, 4]), data=st.data())
def test_a_constant_hash_function_gives_what_no_cache_gives(
    some: list[dict[str, Any]], block_size: int, data: st.DataObject
) -> None:
    config = data.draw(configs(block_size=block_size, enable_prefix_caching=True))
    manager = BlockManager(config.num_kv_blocks, config.block_size, True, lambda *_: 0)
    with_constant = run_all(_sequences(some, config), config, block_manager=manager)
    without_manager = BlockManager(config.num_kv_blocks, config.block_size, False)
    without = run_all(_sequences(some, config), config, block_manager=without_manager)
    for seq_id, story in without.stories.items():
        assert with_constant.stories[seq_id].token_ids == story.token_ids
