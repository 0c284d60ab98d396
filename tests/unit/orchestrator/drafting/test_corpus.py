"""The corpus index: its look-ups are those of a naive search, and what does not fit the deployment is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from auditor.reference import decoding as reference
from build import corpus_index
from build.corpus_index import build_index, shards_of, sorted_ends
from build.errors import run_command
from build.tokenizer import load_tokenizer
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import load_config
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.corpus import (
    ENDS,
    MANIFEST,
    MAX_DEPTH,
    TOKENS,
    Corpus,
    Shard,
    load_corpus_index,
)
from orchestrator.drafting.lookup import Suffix, SuffixConfig
from orchestrator.drafting.ngram import Ngram, NgramConfig
from tests.support.decode import decode, dependencies
from tests.support.table_target import TableTarget
from tests.support.tiny_models import write_byte_tokenizer

V = 6
WIDE = Budget(100, 100)
documents_of_ids = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6)


def corpus_of(documents: list[list[int]], most: int = 1000) -> Corpus:
    shards = [Shard(tokens, sorted_ends(tokens, V)) for tokens in shards_of(iter(documents), V, most)]
    return Corpus(shards, V)


def naive_places(documents: list[list[int]], suffix: list[int]) -> list[tuple[int, int]]:
    """Where a text occurs with a token after it: (document, place of that token)."""
    size = len(suffix)
    return [
        (number, end)
        for number, ids in enumerate(documents)
        for end in range(size, len(ids))
        if ids[end - size : end] == suffix
    ]


@settings(deadline=None, max_examples=150)
@given(
    documents_of_ids,
    st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    st.integers(1, 12),
    st.integers(31, 80),
)
def test_look_ups_are_those_of_a_naive_search(
    documents: list[list[int]], text: list[int], max_depth: int, most: int
) -> None:
    """The text does not repeat itself, so that suffix decoding drafts from the corpus alone."""
    corpus = corpus_of(documents, most)  # documents fit into a shard, so that none is cut
    lengths = [n for n in range(1, min(len(text), max_depth) + 1) if naive_places(documents, text[-n:])]
    config = SuffixConfig(max_depth=max_depth, factor=1.0, min_prob=0.0, draft_len=1, tree=False)
    found = Suffix(config, dependencies(corpus=corpus)).propose(Context(text), Sampling(), WIDE).tree.tokens.tolist()
    if not lengths:
        assert found == []
        return
    suffix = text[-max(lengths) :]
    truth = Counter(documents[number][end] for number, end in naive_places(documents, suffix))
    assert found == [min(truth, key=lambda token: (-truth[token], token))]
    assert corpus.followers(suffix) == truth


@settings(deadline=None)
@given(documents_of_ids)
def test_places_are_sorted_by_the_text_before_them(documents: list[list[int]]) -> None:
    (tokens,) = shards_of(iter(documents), V, 1000)
    ends = sorted_ends(tokens, V).tolist()
    assert ends == sorted(ends, key=lambda end: (tokens[max(end - MAX_DEPTH, 0) : end][::-1].tolist(), end))
    assert sorted(ends) == [i for i in range(1, len(tokens)) if V not in tokens[i - 1 : i + 1].tolist()]


def test_texts_that_agree_for_longer_than_the_index_is_sorted() -> None:
    corpus = corpus_of([[1] * 300, [2, *[1] * 100, 3]])
    assert corpus.followers([1] * MAX_DEPTH)[1] > 200
    draft = Suffix(SuffixConfig(max_depth=MAX_DEPTH, factor=1.0), dependencies(corpus=corpus))
    assert draft.propose(Context([2, *[1] * MAX_DEPTH]), Sampling(), WIDE).tree.num_nodes


def test_shards_are_bounded_and_no_token_is_lost() -> None:
    documents = [list(range(5)) * 7, [1, 2], [3] * 100]
    shards = list(shards_of(iter(documents), V, 40))
    assert all(len(tokens) <= 40 and tokens[-1] == V for tokens in shards)
    assert [t for tokens in shards for t in tokens.tolist() if t != V] == [t for ids in documents for t in ids]


# The methods


def test_suffix_drafts_the_likeliest_continuations() -> None:
    corpus = corpus_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0], [1, 2, 3, 5, 5], [0, 2, 1, 1]])
    proposer = Suffix(SuffixConfig(factor=4.0, min_prob=0.3), dependencies(corpus=corpus))
    proposal = proposer.propose(Context([0, 1, 2]), Sampling(), WIDE)
    # Three of three documents go on with 3, then two of three with 4, one with 5; below 4 one each of 5 and 0.
    assert proposal.tree.paths[1:] == [(3,), (3, 4), (3, 5), (3, 4, 0), (3, 4, 5), (3, 5, 5)]
    assert set(proposal.sources) == {"suffix.corpus"}
    chain = Suffix(SuffixConfig(factor=4.0, tree=False), dependencies(corpus=corpus))
    assert chain.propose(Context([0, 1, 2]), Sampling(), WIDE).tree.paths[1:] == [(3,), (3, 4), (3, 4, 0)]
    assert chain.propose(Context([0, 1, 2]), Sampling(), Budget(9, 1)).tree.paths[1:] == [(3,)]
    short = Suffix(SuffixConfig(factor=1.0, tree=False), dependencies(corpus=corpus))
    assert short.propose(Context([4, 1]), Sampling(), WIDE).tree.num_nodes == 1  # a match of one token


def test_the_request_s_own_text_is_preferred_where_it_promises_as_much() -> None:
    proposer = Suffix(SuffixConfig(), dependencies(corpus=corpus_of([[1, 2, 3]])))
    assert proposer.propose(Context([1, 2, 3, 1]), Sampling(), WIDE).sources[0] == "suffix.text"


@settings(deadline=None, max_examples=25)
@given(st.builds(Sampling, st.sampled_from([0.0, 0.9]), seed=st.integers(0, 10**6)), st.booleans())
def test_text_is_the_reference_s(sampling: Sampling, by_ngram: bool) -> None:
    target = TableTarget(V, order=2)
    corpus = corpus_of([reference.generate(target.logits, [1, n], Sampling(0.5, seed=n), 40) for n in range(4)])
    known = dependencies(corpus=corpus, vocab_size=V)
    proposer = Ngram(NgramConfig(), known) if by_ngram else Suffix(SuffixConfig(), known)
    said, statistics = decode(target, proposer, [1, 2], sampling, Limits(30, 1000, 20))
    assert said == reference.generate(target.logits, [1, 2], sampling, 30)
    assert any(source.num_accepted for source in statistics.sources.values())


def test_ngram_needs_one_of_its_sources() -> None:
    with pytest.raises(RequestError, match="corpus_index"):
        Ngram(NgramConfig(), dependencies())


# The files


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    write_byte_tokenizer(made)
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64})
    )
    return made


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return load_tokenizer(target)


def files_in(folder: Path) -> list[Path]:
    text, lines = folder / "text.md", folder / "chats.jsonl"
    text.write_text("the quick brown fox\njumps over\n")
    lines.write_text('{"text": "the quick brown cat"}\n\n{"prompt": "jumps", "completion": " under"}\n')
    return [text, lines]


def test_an_index_of_text_and_json_lines_is_mapped_read_only(
    tmp_path: Path, target: Path, tokenizer: Tokenizer
) -> None:
    num_tokens = build_index(files_in(tmp_path), str(target), tmp_path / "index")
    corpus = load_corpus_index(tmp_path / "index", tokenizer)
    assert corpus.num_tokens == num_tokens
    for shard in corpus.shards:
        assert not shard.tokens.flags.writeable and not shard.ends.flags.writeable
        assert isinstance(shard.tokens, np.memmap) and isinstance(shard.ends, np.memmap)
    followers = corpus.followers(tokenizer.encode("quick brown ", add_special_tokens=False).ids)
    assert {tokenizer.decode([token]) for token in followers} == {"f", "c"}


def test_the_command_uses_the_deployment_s_target_and_replaces_an_index(
    tmp_path: Path,
    target: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "serving.toml").write_text(f'target = "{target}"\ncorpus_index = "index"\n')
    config = load_config(tmp_path / "serving.toml", {})
    assert config.corpus_index == str(tmp_path / "index")
    for files in (files_in(tmp_path), files_in(tmp_path)[:1]):
        command = [
            "corpus_index",
            *map(str, files),
            "--out",
            config.corpus_index,
            "--config",
            str(tmp_path / "serving.toml"),
        ]
        monkeypatch.setattr(sys, "argv", command)
        corpus_index.main()
        loaded = load_corpus_index(config.corpus_index, tokenizer)
        assert f"{loaded.num_tokens} tokens" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "missing.txt cannot be read as UTF-8 text"),
        (["empty.txt"], "there is no text to index"),
        (["bad.jsonl"], "bad.jsonl, line 2 "),
        (["text.md", "--shard-tokens", "9"], "--shard-tokens must be in 1000..268435456, got 9"),
        (["text.md", "--out", "."], "exists and is not a corpus index"),
        (["text.md", "--target", "./nowhere"], "nowhere"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    files_in(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["corpus_index", "--out", "index", "--target", str(target), *arguments])
    with pytest.raises(SystemExit) as left:
        run_command(corpus_index.main)
    error = capsys.readouterr().err
    assert left.value.code == 2 and said in error and error.count("\n") == 1


def test_an_index_of_another_vocabulary_is_refused(tmp_path: Path, target: Path) -> None:
    build_index(files_in(tmp_path), str(target), tmp_path / "index")
    other = Tokenizer.from_str((target / "tokenizer.json").read_text())
    other.add_tokens(["entirely"])
    with pytest.raises(ConfigError, match=r"indexed with another vocabulary .* than the target's"):
        load_corpus_index(tmp_path / "index", other)


def break_manifest(index: Path) -> None:
    (index / MANIFEST).write_text("{")


def break_format(index: Path) -> None:
    manifest = json.loads((index / MANIFEST).read_text())
    (index / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))


def break_tokens(index: Path) -> None:
    np.save(index / TOKENS.format(0), np.full(9, 10**6, np.int32))


def break_ends(index: Path) -> None:
    np.save(index / ENDS.format(0), np.array([10**6], np.uint32))


def break_type(index: Path) -> None:
    np.save(index / ENDS.format(0), np.array([1.0]))


def cut_tokens(index: Path) -> None:
    file = index / TOKENS.format(0)
    file.write_bytes(file.read_bytes()[:-20])


def remove_shard(index: Path) -> None:
    (index / ENDS.format(0)).unlink()


@pytest.mark.parametrize(
    "damage", [break_manifest, break_format, break_tokens, break_ends, break_type, cut_tokens, remove_shard]
)
def test_a_damaged_index_is_a_clear_error(tmp_path: Path, target: Path, tokenizer: Tokenizer, damage: object) -> None:
    build_index(files_in(tmp_path), str(target), tmp_path / "index")
    damage(tmp_path / "index")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"key corpus_index in the deployment file") as caught:
        load_corpus_index(tmp_path / "index", tokenizer)
    assert "\n" not in str(caught.value)
