"""Methods whose drafts native code makes: the proposals of the references, whatever the parameters and the budget."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from native import drafts
from native.response_memory import NativeMemory
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting import native_methods
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.guarded import Guarded
from orchestrator.drafting.memory import Memory, new_memory
from orchestrator.drafting.native_methods import CLIPS, MATCHES, NativeMethod, predicted, prompt_lookup, suffix
from orchestrator.drafting.predicted import Predicted, PredictedConfig
from orchestrator.drafting.prompt_lookup import PromptLookup, PromptLookupConfig
from orchestrator.drafting.suffix import CORPUS, MEMORY, TEXT, Suffix, SuffixConfig
from tests.support.decode import dependencies
from tests.unit.orchestrator.drafting.test_corpus import corpus_of
from tests.unit.orchestrator.drafting.test_native_growth import spied

LENGTH = 200


def pairs(rng: random.Random) -> Iterator[tuple[Proposer, Proposer]]:
    """The native proposer and the reference, with parameters at random."""
    lookup = PromptLookupConfig(
        max_ngram=rng.randint(1, 8),
        draft_len=rng.randint(1, 20),
        match=rng.choice(MATCHES),  # type: ignore[arg-type]
        branches=rng.choice([1, 1, 2, 5]),
        length=rng.choice(["fixed", "grown"]),
        clip=rng.choice(CLIPS),  # type: ignore[arg-type]
    )
    yield prompt_lookup(lookup, dependencies()), PromptLookup(lookup, dependencies())
    trees = suffix_config(rng)
    yield suffix(trees, dependencies()), Suffix(trees, dependencies())


def suffix_config(rng: random.Random) -> SuffixConfig:
    """Parameters at random."""
    return SuffixConfig(
        max_depth=rng.randint(1, 30),
        factor=rng.choice([0.5, 1.0, 2.7, 4.0]),
        min_prob=rng.choice([0.0, 0.1, 0.3]),
        draft_len=rng.randint(1, 40),
        tree=rng.choice([True, False]),
    )


def text_of(rng: random.Random, vocab_size: int, length: int = LENGTH) -> list[int]:
    """A text that repeats pieces of itself."""
    text = [rng.randrange(vocab_size) for _ in range(5)]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randint(1, 20)] + [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
    return text


def assert_same(native: Proposer, reference: Proposer, context: Context, budget: Budget) -> int:
    """Assert that both propose the same for the budget, cut as the registry has it; return the number of nodes."""
    found, expected = (Guarded(each, 1000).propose(context, Sampling(), budget) for each in (native, reference))
    assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
    assert found.tree.parents.tolist() == expected.tree.parents.tolist()
    assert found.sources == expected.sources
    return found.tree.num_nodes


@pytest.mark.parametrize("seed", range(30))
def test_native_proposals_are_those_of_the_reference(seed: int) -> None:
    rng, num_nodes = random.Random(seed), 0
    text = text_of(rng, rng.choice([3, 12, 700]))
    for native, reference in pairs(rng):
        assert isinstance(native, NativeMethod)
        context = Context(text[:3])
        while len(context) < LENGTH:
            budget = Budget(rng.randint(0, 30), rng.randint(0, 12))
            num_nodes += assert_same(native, reference, context, budget)
            context.commit(text[len(context) : len(context) + rng.randint(1, 6)])
    assert num_nodes > 50


def test_of_many_tokens_and_places_the_same_ones_are_looked_at() -> None:
    """A token occurs 600 times and has 300 followers, more than are looked at; the most frequent one comes late."""
    text = [token for follower in range(1, 301) for token in (0, follower)] + [0, 290] * 300 + [999, 0]
    for name in MATCHES:
        config = PromptLookupConfig(match=name, branches=16)  # type: ignore[arg-type]
        reference = PromptLookup(config, dependencies())
        assert assert_same(prompt_lookup(config, dependencies()), reference, Context(text), Budget(128, 128))
    trees = SuffixConfig(min_prob=0.0, draft_len=128, factor=128.0)
    assert assert_same(suffix(trees, dependencies()), Suffix(trees, dependencies()), Context(text), Budget(128, 128))


def prediction_of(rng: random.Random, output: list[int], vocab_size: int) -> tuple[int, ...]:
    """The output with tokens replaced, left out and put in, and pieces of it moved; or another text."""
    if rng.random() < 0.2:
        return tuple(text_of(rng, vocab_size))
    prediction, damage = list[int](), rng.choice([0.0, 0.02, 0.1, 0.4])
    for token in output:
        choice = rng.random() / damage if damage else 9
        prediction += [token] if choice > 1 else [rng.randrange(vocab_size)] * (choice < 0.6) + [token] * (choice < 0.3)
    start, end = sorted(rng.randrange(len(output)) for _ in range(2))
    return tuple(prediction[start:end] + prediction if rng.random() < 0.5 else prediction[start:])


def predicted_pair(config: PredictedConfig, prediction: tuple[int, ...]) -> tuple[Proposer, Predicted]:
    """The native proposer and the reference, each with the prediction."""
    native = predicted(config, dependencies(prediction=prediction))
    assert isinstance(native, NativeMethod)
    return native, Predicted(config, dependencies(prediction=prediction))


def num_accepted(draft: list[int], rest: list[int]) -> int:
    """The number of draft tokens that a target would accept if the rest of its text is this."""
    return next((n for n, (token, other) in enumerate(zip(draft, rest, strict=False)) if token != other), len(draft))


def followed(seed: int) -> Iterator[tuple[int, int, int]]:
    """Compare both along a text; yield for each step the rejected drafts in a row, the nodes and those accepted.

    In some texts each step commits what a target commits that verifies the draft, in others any number of tokens.
    """
    rng, in_a_row = random.Random(seed), 0
    vocab_size, prompt_len, follows_steps = rng.choice([3, 12, 700]), rng.choice([1, 3, 40]), rng.random() < 0.7
    text = text_of(rng, vocab_size)
    config = PredictedConfig(max_ngram=rng.randint(1, 8), draft_len=rng.choice([1, 4, 16, 128]))
    native, reference = predicted_pair(config, prediction_of(rng, text[prompt_len:], vocab_size))
    context = Context(text[:prompt_len])
    context.commit(text[prompt_len:][: rng.choice([0, 0, 1, 30])])  # output that another replica generated
    while len(context) < len(text):
        budget = Budget(128, 128)
        if rng.random() < 0.3:
            budget = Budget(rng.choice([0, 3, 30]), rng.choice([0, 12, 128]))
        num_nodes = assert_same(native, reference, context, budget)
        uncut = native.propose(context, Sampling(), budget)
        assert uncut.tree.num_nodes == num_nodes, "nothing needs to be cut, and a second proposal is the first one"
        draft, rest = reference.prediction[reference.expected :][:num_nodes], text[len(context) :]
        accepted = num_accepted(draft, rest)
        yield in_a_row, num_nodes, accepted
        if num_nodes:
            in_a_row = 0 if accepted else in_a_row + 1
        context.commit(rest[: accepted + 1 if follows_steps else rng.randint(1, 12)])


def test_native_code_follows_a_prediction_as_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PIECE", 5)
    steps = [step for seed in range(400) for step in followed(seed)]
    num_rejected = [in_a_row for in_a_row, num_nodes, _ in steps if num_nodes]
    assert {*num_rejected} == {*range(10)}, "drafts come after at most max_ngram + 1 rejections"
    assert sum(in_a_row > 2 and not num_nodes for in_a_row, num_nodes, _ in steps) > 100, "it has been given up"
    assert sum(in_a_row > 2 and accepted > 3 for in_a_row, _, accepted in steps) > 20, "it has been found again"


def test_no_call_reads_more_than_a_piece_of_a_long_prediction_or_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call keeps Python's global lock: to read 131,072 tokens at once would stop all requests."""
    read, next_of, read_by_next = list[int](), drafts.NativeProposer._next, list[int]()

    def noted(native: drafts.NativeProposer, tokens: Sequence[int], *limits: int) -> int:
        read_by_next.append(len(tokens))
        return next_of(native, tokens, *limits)

    library = spied(drafts.drafts_library(), read)
    monkeypatch.setattr(drafts, "drafts_library", lambda: library)
    monkeypatch.setattr(drafts.NativeProposer, "_next", noted)
    prediction = text_of(random.Random(2), 700, 5000)
    native, reference = predicted_pair(PredictedConfig(), tuple(prediction))
    context = Context(prediction[-100:])
    context.commit(prediction[:4500])
    assert assert_same(native, reference, context, Budget(128, 128)) == 16
    assert read == [2048, 2048, len(prediction) - 4096, 8]
    assert read_by_next == [2048, 2048, 404]


def test_a_long_text_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(random.Random(1), 12)
    monkeypatch.setattr("native.drafts.PIECE", 7)
    for native, reference in pairs(random.Random(1)):
        assert assert_same(native, reference, Context(text), Budget(128, 128))


@pytest.mark.parametrize("seed", range(16))
def test_native_suffix_drafts_from_memory_and_corpus_as_the_reference_does(seed: int) -> None:
    rng = random.Random(seed)
    text, bound = text_of(rng, rng.choice([4, 12, 40])), rng.choice([30, 400, 5000])
    pieces = [text[start : start + rng.randint(1, 30)] for start in range(0, LENGTH, 9)]
    corpus: Corpus | None = corpus_of(rng.sample(pieces, 12) * rng.choice([1, 40])) if seed % 4 else None
    native_memory, memory, trees = new_memory(bound), Memory(bound), suffix_config(rng)
    assert isinstance(native_memory, NativeMemory)
    native = suffix(trees, dependencies(memory=native_memory.of("a"), corpus=corpus))
    reference = Suffix(trees, dependencies(memory=memory.of("a"), corpus=corpus))
    assert isinstance(native, NativeMethod)
    context, num_nodes = Context(text[:3]), 0
    while len(context) < LENGTH:
        response, salt = text_of(rng, 12)[: rng.randint(0, 40)] if rng.random() < 0.5 else rng.choice(pieces), "aab"
        for each, name in ((native_memory, salt[seed % 3]), (memory, salt[seed % 3])):
            each.learn(name, response)
        num_nodes += assert_same(native, reference, context, Budget(rng.randint(0, 30), rng.randint(0, 12)))
        context.commit(text[len(context) : len(context) + rng.randint(1, 6)])
    assert num_nodes > 20


def test_each_source_of_suffix_is_drafted_from_and_named() -> None:
    memory = new_memory(1000)
    memory.learn("a", [*range(20)])
    given = dependencies(memory=memory.of("a"), corpus=corpus_of([[*range(30, 60)]]))
    proposer = suffix(SuffixConfig(), given)
    for context, source in (([0, 1, 2], MEMORY), ([30, 31, 32], CORPUS), ([*range(70, 75)] * 2, TEXT)):
        proposal = suffix(SuffixConfig(), given).propose(Context(context), Sampling(), Budget(9, 9))
        assert {*proposal.sources} == {source}
    assert proposer.native_drafts and proposer.native_drafts.sources == (TEXT, MEMORY, CORPUS)


def test_without_a_compiler_the_references_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native_predicted", "native_prompt_lookup", "native_suffix"):
        monkeypatch.setattr(native_methods, name, lambda *_: None)
    assert isinstance(predicted(PredictedConfig(), dependencies(prediction=(1, 2))), Predicted)
    assert isinstance(prompt_lookup(PromptLookupConfig(), dependencies()), PromptLookup)
    assert isinstance(suffix(SuffixConfig(), dependencies()), Suffix)
