"""Suffix decoding: drafts by hand, the size that a match deserves, and the reference's text whatever was drafted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import decoding as reference
from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.lookup import Suffix, SuffixConfig
from orchestrator.server.statistics import Statistics
from tests.support.decode import decode, dependencies
from tests.support.table_target import TableTarget

WIDE = Budget(128, 1000)
VOCAB_SIZE = 6


def proposed(ids: list[int], budget: Budget = WIDE, memory: NativeMemory | None = None, **keys: object) -> Proposal:
    """A draft; as many nodes as the match has tokens, unless `factor` says otherwise."""
    config = SuffixConfig(**{"factor": 1.0, **keys})  # type: ignore[arg-type]
    proposer = Suffix(config, dependencies(memory=memory.of("") if memory else None))
    proposal = proposer.propose(Context(ids), Sampling(), budget)
    tree = proposal.tree
    type(tree).checked(tree.tokens, tree.parents, 1000, 128)
    assert len(proposal.sources) == tree.num_nodes and not proposal.q
    return proposal


def chain(ids: list[int], **keys: object) -> list[int]:
    tree = proposed(ids, tree=False, **keys).tree  # type: ignore[arg-type]
    assert tree.is_chain
    return tree.tokens.tolist()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3], []),
        ([1], []),
        ([1, 2, 3, 9, 1, 2], [3, 9]),  # a match of two deserves two tokens
        ([4, 1, 2, 3, 9, 5, 4, 1, 2], [3, 9, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2], [3, 7]),  # 3 followed twice, 4 once
        ([1, 2, 3, 7, 1, 2, 4, 8, 1, 2], [4, 8]),  # as often: the more recent
        ([5, 6, 5, 6], [5, 6]),
        ([5, 6, 7, 5, 6, 7, 5, 6, 7], [5, 6, 7, 5, 6, 7]),  # on into its own repetition
    ],
)
def test_suffix_chain_by_hand(ids: list[int], expected: list[int]) -> None:
    assert chain(ids) == expected


def test_suffix_longer_match_and_larger_factor_deserve_longer_drafts() -> None:
    text = list(range(10, 30))
    for length in range(1, 6):
        ids = [*text, *text[5 : 5 + length]]
        assert chain(ids) == text[5 + length : 5 + 2 * length]
        assert chain(ids, factor=2.0) == text[5 + length : 5 + 3 * length]
        assert chain(ids, factor=0.5) == text[5 + length : 5 + length + length // 2]
        assert chain(ids, factor=99.0, draft_len=4) == text[5 + length : 9 + length]
        assert chain(ids, max_depth=2) == text[5 + length : 5 + length + min(length, 2)]


def test_suffix_budget_cuts_nodes_and_levels() -> None:
    ids = [*range(10, 30), *range(10, 20)]
    assert chain(ids, budget=Budget(3, 99)) == chain(ids, budget=Budget(99, 3)) == [20, 21, 22]
    assert chain(ids, budget=Budget(0, 9)) == chain(ids, budget=Budget(9, 0)) == []


FORKED = [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]
# Behind 1 2: 3 twice (then 5 and 6 once each), 4 once (then 7). Path probabilities 2/3, 1/3, 1/3, 1/3, 1/3.


def test_suffix_tree_takes_the_most_probable_paths_first() -> None:
    tree = proposed(FORKED, factor=2.5).tree
    assert tree.tokens.tolist() == [3, 4, 6, 5, 7]
    assert tree.parents.tolist() == [0, 0, 1, 1, 2]
    assert proposed(FORKED, factor=1.0).tree.tokens.tolist() == [3, 4]
    assert proposed(FORKED, factor=2.5, tree=False).tree.tokens.tolist() == [3, 6, 1, 2, 4]


def test_suffix_min_prob_ends_improbable_paths() -> None:
    assert proposed(FORKED, factor=9.0, min_prob=0.34).tree.tokens.tolist() == [3]
    assert proposed(FORKED, factor=9.0, min_prob=0.67).tree.num_nodes == 0
    assert chain(FORKED, factor=9.0, min_prob=0.34) == [3]
    assert all(
        proposed(FORKED, factor=9.0, min_prob=low).tree.num_nodes
        >= proposed(FORKED, factor=9.0, min_prob=high).tree.num_nodes
        for low, high in ((0.0, 0.1), (0.1, 0.2), (0.2, 0.34))
    )


def test_suffix_tree_holds_the_chain() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(3) for _ in range(60)]
        for size in range(1, 9):
            tree = proposed(ids, draft_len=size, min_prob=0.0).tree
            assert tree.num_nodes <= size
            first = chain(ids, draft_len=1, min_prob=0.0)
            assert not first or first[0] in tree.children[0]


def test_suffix_index_grown_step_by_step_gives_the_same_as_a_fresh_one() -> None:
    rng = random.Random(4)
    for _ in range(50):
        context, grown = Context([rng.randrange(3)]), Suffix(SuffixConfig(factor=1.0), dependencies())
        for _ in range(30):
            context.commit([rng.randrange(3) for _ in range(rng.randint(1, 4))])
            here, fresh = grown.propose(context, Sampling(), WIDE), proposed(context.ids)
            assert here.tree.tokens.tolist() == fresh.tree.tokens.tolist()
            assert here.tree.parents.tolist() == fresh.tree.parents.tolist()


def test_suffix_of_text_and_memory_the_one_that_promises_more_wins() -> None:
    memory = NativeMemory(1000)
    memory.learn("", [1, 2, 3, 40, 41, 42])
    ours = [9, 3, 50, 8, 9, 3]  # a match of two in the text
    assert proposed(ours, memory=memory).sources == ("suffix.text",) * 2
    theirs = [9, 3, 50, 8, 1, 2, 3]  # of three in the memory, of one in the text
    proposal = proposed(theirs, memory=memory)
    assert proposal.tree.tokens.tolist() == [40, 41, 42]
    assert proposal.sources == ("suffix.memory",) * 3
    assert proposed(theirs, memory=NativeMemory(1000)).sources == ("suffix.text",)
    level = [3, 50, 3]  # one token each: its own text
    assert proposed(level, memory=memory).tree.tokens.tolist() == [50]


def run(proposer: Suffix, prompt: list[int], sampling: Sampling, num_tokens: int) -> tuple[list[int], Statistics]:
    target = TableTarget(VOCAB_SIZE, table_seed=sampling.seed % 5, sharpness=3.0)
    ids, statistics = decode(target, proposer, prompt, sampling, Limits(num_tokens, 10_000, 128))
    assert ids == reference.generate(target.logits, prompt, sampling, num_tokens)
    return ids, statistics


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**64 - 2),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([{}, {"factor": 4.0, "min_prob": 0.0}, {"max_depth": 2, "draft_len": 3}]),
)
def test_suffix_any_setting_gives_the_reference_s_text(
    temperature: float,
    seed: int,
    prompt: list[int],
    length: int,
    tree: bool,
    keys: dict[str, float],
) -> None:
    memory = NativeMemory(200)
    for lesson in range(3):
        proposer = Suffix(SuffixConfig(tree=tree, **keys), dependencies(memory=memory.of("a")))  # type: ignore[arg-type]
        ids, _ = run(proposer, prompt, Sampling(temperature, seed=seed + lesson // 2), length)
        memory.learn("a", ids)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [False, True])
def test_suffix_drafts_are_accepted(temperature: float, tree: bool) -> None:
    """So the law above is not vacuous; a second run of one request repeats what the memory holds."""
    memory, sampling = NativeMemory(10_000), Sampling(temperature, seed=7)
    config = SuffixConfig(tree=tree, factor=4.0)
    ids, cold = run(Suffix(config, dependencies()), [1, 2, 3], sampling, 200)
    assert cold.sources["suffix.text"].num_accepted > 20
    memory.learn("", ids)
    _, warm = run(Suffix(config, dependencies(memory=memory.of(""))), [1, 2, 3], sampling, 200)
    accepted = {name: count.num_accepted for name, count in warm.sources.items()}
    assert accepted.get("suffix.text", 0) + accepted["suffix.memory"] == warm.num_accepted_tokens
    if temperature:
        assert accepted["suffix.memory"] > 10
        assert warm.num_steps < cold.num_steps
