"""The loop: whatever is proposed, the text is the reference's, within its limits."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from auditor.reference import decoding as reference
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.drafting.lookup import PromptLookup, PromptLookupConfig
from orchestrator.drafting.none import NoProposer
from orchestrator.server.loop import SequenceState, StepByStep, StepsOfRun, generate
from orchestrator.server.text import Chunk, FinishReason, Output, StopRule
from tests.support.decode import dependencies
from tests.support.table_target import TableTarget
from tests.support.tiny_models import write_byte_tokenizer

VOCAB_SIZE = 6
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass
class RandomTrees(Proposer):
    """Proposes what the budget leaves of random trees; `tokens` may lie outside the vocabulary."""

    seed: int
    num_paths: int = 6
    depth: int = 6
    tokens: tuple[int, int] = (0, VOCAB_SIZE - 1)
    name: str = "random"
    options: StepOptions = field(default_factory=StepOptions)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.observed: list[tuple[TokenTree, Acceptance]] = []

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        paths = [
            [self.rng.randint(*self.tokens) for _ in range(self.rng.randint(0, self.depth))]
            for _ in range(self.rng.randint(0, self.num_paths))
        ]
        return Proposal.of(TokenTree.from_paths(paths), self.name).cut(budget)

    def observe(self, steps: Sequence[Step]) -> None:
        self.observed += [(step.proposal.tree, step.acceptance) for step in steps]

    def close(self) -> None:
        raise AssertionError("the loop does not own its proposer")


class Oracle(RandomTrees):
    """Knows the reference's text and proposes as much of it as the budget allows."""

    def __init__(self, target: TableTarget, sampling: Sampling, wrong_every: int = 0) -> None:
        super().__init__(0)
        self.target, self.sampling, self.wrong_every = target, sampling, wrong_every

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        truth = reference.generate(self.target.logits, context.ids, self.sampling, 12)
        if self.wrong_every:
            truth[self.wrong_every - 1] = (truth[self.wrong_every - 1] + 1) % VOCAB_SIZE
        return Proposal.chain(truth, self.name).cut(budget)


@dataclass
class SpyTarget(TableTarget):
    """Notes what it was asked, and that no node lies beyond the context."""

    max_positions: int = 10_000
    trees: list[TokenTree] = field(default_factory=list)

    def step(
        self, context: Context, tree: TokenTree, sampling: Sampling, options: StepOptions, q: Any = ()
    ) -> Acceptance:
        assert len(context) + tree.depths.max() <= self.max_positions
        self.trees.append(tree)
        return super().step(context, tree, sampling, options, q)


@dataclass
class Run:
    """What came of a call of the loop."""

    sequence: SequenceState
    chunks: list[Chunk]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]


def run(
    tokenizer: Tokenizer,
    target: TableTarget,
    proposer: Proposer,
    sampling: Sampling,
    rule: StopRule,
    limits: Limits | None = None,
    guard: Callable[[], FinishReason | None] = lambda: None,
    options: StepOptions = StepOptions(),  # noqa: B008
) -> Run:
    limits = limits or Limits(rule.max_tokens, 10_000, 128)
    sequence = SequenceState(Context(PROMPT), sampling, limits, Output(tokenizer, PROMPT, rule), options)
    made = Run(sequence, [])
    generate(sequence, StepByStep(sequence, target, proposer), guard, made.chunks.append)
    assert sequence.output.finish
    return made


PROPOSERS: dict[str, Callable[[TableTarget, Sampling], Proposer]] = {
    "none": lambda target, sampling: NoProposer(),
    "prompt_lookup": lambda target, sampling: PromptLookup(PromptLookupConfig(draft_len=5), dependencies()),
    "random trees": lambda target, sampling: RandomTrees(1),
    "outside the vocabulary": lambda target, sampling: RandomTrees(2, tokens=(-3, 2 * VOCAB_SIZE)),
    "far too much": lambda target, sampling: RandomTrees(3, num_paths=200, depth=30),
    "always right": Oracle,
    "wrong at the third": lambda target, sampling: Oracle(target, sampling, wrong_every=3),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", PROPOSERS)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**64 - 1), st.integers(1, 30), st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1))
def test_loop_any_proposer_gives_the_reference_s_text(
    tokenizer: Tokenizer, name: str, temperature: float, seed: int, max_tokens: int, stop_ids: frozenset[int]
) -> None:
    target = SpyTarget(VOCAB_SIZE, table_seed=seed % 7, max_positions=len(PROMPT) + max_tokens)
    sampling = Sampling(temperature, top_p=0.95, seed=seed)
    limits = Limits(max_tokens, target.max_positions, 128)
    made = run(tokenizer, target, PROPOSERS[name](target, sampling), sampling, StopRule(max_tokens, stop_ids), limits)
    truth = reference.generate(target.logits, PROMPT, sampling, max_tokens, stop_ids)
    assert made.ids == truth
    assert made.sequence.output.finish is (FinishReason.STOP if truth[-1] in stop_ids else FinishReason.LENGTH)
    assert made.sequence.context.ids[: len(PROMPT) + len(truth)] == PROMPT + truth
    assert len(made.sequence.context) <= target.max_positions
    assert "".join(chunk.text for chunk in made.chunks) == tokenizer.decode(
        truth[:-1] if truth[-1] in stop_ids else truth
    )


def test_loop_budget_shrinks_to_the_last_token_and_to_the_context(tokenizer: Tokenizer) -> None:
    target, sampling = SpyTarget(VOCAB_SIZE, max_positions=len(PROMPT) + 5), Sampling()
    run(tokenizer, target, Oracle(target, sampling), sampling, StopRule(5), Limits(5, target.max_positions, 128))
    assert [tree.num_nodes for tree in target.trees] == [4]
    # The context ends before max_tokens does: no level beyond it.
    short = SpyTarget(VOCAB_SIZE, max_positions=len(PROMPT) + 2)
    run(tokenizer, short, Oracle(short, sampling), sampling, StopRule(3), Limits(9, short.max_positions, 128))
    assert [tree.num_nodes for tree in short.trees] == [2]


@pytest.mark.parametrize(
    ("num_out", "max_tokens", "max_positions", "depth"),
    [
        (0, 1, 99, 0),
        (0, 5, 99, 4),
        (3, 5, 99, 1),
        (4, 5, 99, 0),
        (0, 50, 10, 7),
        (6, 50, 10, 1),
        (7, 50, 10, 0),
        (9, 5, 5, 0),
    ],
)
def test_limits_budget_by_hand(num_out: int, max_tokens: int, max_positions: int, depth: int) -> None:
    context = Context(PROMPT)
    context.commit([0] * num_out)
    assert Limits(max_tokens, max_positions, 7).budget(context) == Budget(7, depth)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_loop_guard_ends_it_before_the_next_step(tokenizer: Tokenizer, reason: FinishReason, num_steps: int) -> None:
    target = SpyTarget(VOCAB_SIZE)
    made = run(
        tokenizer, target, NoProposer(), Sampling(), StopRule(50, strings=("zz",)),
        guard=lambda: reason if target.num_steps >= num_steps else None,
    )  # fmt: skip
    assert target.num_steps == num_steps == len(made.ids)
    assert made.sequence.output.finish is reason
    assert made.chunks[-1].ids == [] and made.ids == reference.generate(target.logits, PROMPT, Sampling(), num_steps)


def test_loop_steps_are_counted_as_the_papers_do(tokenizer: Tokenizer) -> None:
    target, sampling = SpyTarget(VOCAB_SIZE), Sampling(0.9, seed=4)
    made = run(tokenizer, target, Oracle(target, sampling, wrong_every=3), sampling, StopRule(8))
    counts = made.sequence.statistics
    assert counts.num_steps == target.num_steps == len(made.chunks)
    assert counts.step_lengths == [len(chunk.ids) for chunk in made.chunks] == [3, 3, 2]
    assert counts.num_draft_tokens == sum(tree.num_nodes for tree in target.trees) == 7 + 4 + 1
    assert counts.num_accepted_tokens == 2 + 2 + 1
    assert counts.acceptance_rate == 5 / 12
    assert made.sequence.statistics.num_in_pass == counts.num_steps
    assert made.sequence.statistics.first_token_s > 0


def test_loop_cached_tokens_of_a_continued_text_are_no_more_than_its_prompt(tokenizer: Tokenizer) -> None:
    sequence = SequenceState(
        Context(PROMPT), Sampling(), Limits(9, 10_000, 128), Output(tokenizer, PROMPT, StopRule(9))
    )
    sequence.context.commit([1] * 6)
    sequence.output.push([1] * 6)
    acceptance = Acceptance((), 1, num_cached_tokens=len(PROMPT) + 5)
    steps = StepsOfRun(sequence, lambda: [Step(Proposal.empty(), acceptance, 0.0, 0.0)])
    generate(sequence, steps, lambda: None, id)
    assert sequence.statistics.num_cached_tokens == len(PROMPT)
    assert sequence.statistics.num_tokens == 3 and sequence.output.num_tokens == 9


def test_loop_proposer_observes_what_was_verified(tokenizer: Tokenizer) -> None:
    target, proposer = SpyTarget(VOCAB_SIZE), RandomTrees(5)
    run(tokenizer, target, proposer, Sampling(), StopRule(9))
    assert [tree for tree, _ in proposer.observed] == target.trees


def test_loop_target_that_fails_stops_it_with_its_error(tokenizer: Tokenizer) -> None:
    class Broken(TableTarget):
        def step(
            self, context: Context, tree: TokenTree, sampling: Sampling, options: StepOptions, q: Any = ()
        ) -> Acceptance:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(tokenizer, Broken(), NoProposer(), Sampling(), StopRule(3))


def test_core_loads_neither_torch_nor_triton() -> None:
    code = "import sys, orchestrator.server.request_builder, orchestrator.server.responses, orchestrator.server.admission; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "orchestrator.server.loop" in loaded.split()
    assert not {"torch", "transformers", "runtime", "triton_python_backend_utils"} & set(loaded.split())
