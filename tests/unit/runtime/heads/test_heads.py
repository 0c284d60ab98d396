"""The heads' modules and engines against plain forward passes written from the equations by another hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core import noise
from orchestrator.core.errors import EngineError, RequestError, Unavailable, UnknownSequence
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.tree import TokenTree
from runtime.engine.calls import EngineCall
from runtime.heads.engines import drafts, ranking
from runtime.heads.engines.eagle import EagleEngine
from runtime.heads.engines.medusa import MedusaEngine
from runtime.heads.engines.redrafter import RedrafterEngine
from runtime.heads.engines.trees import DynamicTree
from tests.support import heads_oracle as oracle
from tests.support.choice_trees import published_choices
from tests.support.dynamic_tree import dynamic_tree
from tests.support.heads import (
    HIDDEN_SIZE,
    draft,
    load,
    make_head,
    make_target,
    native_or_skip,
    paths_of,
    request,
    tables,
)
from tests.support.tiny_models import VOCAB_SIZE

Path_ = tuple[int, ...]
EAGLE_TREE = tree_of_choices(published_choices("eagle1_25"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


class Eagle:
    """An engine over a random EAGLE head, and the oracle of what it says after a path.

    native: the engine runs native code in float32, not torch in float64.
    """

    def __init__(self, kind: str, folder: Path, target: Path, native: bool = False, **options: Any) -> None:
        self.kind = kind
        make_head(kind, folder, wide=native, **options)
        self.head = load(kind, folder, target, torch.float32 if native else torch.float64)
        self.native = native_or_skip(self.head) if native else None
        self.engine = self.new_engine()
        self.tensors, self.config = oracle.read_tensors(folder), oracle.read_config(folder)
        self.embedding, self.lm_head = tables(target)
        self.width = HIDDEN_SIZE * (3 if kind == "eagle3" else 1)

    def new_engine(self, block_tokens: int = 4) -> EagleEngine:
        return EagleEngine(self.head, memory_mb=1, block_tokens=block_tokens, native=self.native)

    def log_q(
        self, ids: list[int], features: np.ndarray, path: Path_, positions: list[int] | None = None
    ) -> np.ndarray:
        """Return (V,) log q after ids and path; features of `positions`, all by default."""
        kept = positions if positions is not None else list(range(len(ids) - 1))
        rows, tokens = features[kept].astype(np.float32).astype(np.float64), [ids[i + 1] for i in kept]
        if self.kind == "eagle":
            logits = oracle.eagle_logits(
                self.tensors, self.config, self.embedding, self.lm_head, rows, tokens, path, kept
            )
        else:
            logits = oracle.eagle3_logits(self.tensors, self.config, self.embedding, rows, tokens, path, kept)
            logits = oracle.over_target(self.tensors, logits, VOCAB_SIZE)
        return oracle.log_softmax(logits[-1])


#: Of EAGLE-3.1: the paper's norms, and those of gpt-oss's heads with a normed residual.
NORMS = (("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual", "norm_output"))


@pytest.fixture(
    scope="module",
    params=[
        *((kind, native, ()) for kind in ("eagle", "eagle3") for native in (False, True)),
        *(("eagle3", native, norms) for norms in NORMS for native in (False, True)),
    ],
    ids=lambda param: "-".join([param[0], "native" if param[1] else "torch", *param[2]]),
)
def eagle(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    kind, native, norms = request.param
    return Eagle(kind, tmp_path_factory.mktemp(kind), target, native, **({"norms": norms} if norms else {}))


@pytest.fixture(params=["eagle", "eagle3"])
def torch_eagle(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Eagle:
    return Eagle(request.param, tmp_path, target)


def random_context(length: int, width: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, VOCAB_SIZE, length).tolist(), rng.normal(0, 1, (length - 1, width))


def same_dynamic(drafted: Any, expected: list[tuple[Path_, float]]) -> bool:
    return paths_of(drafted) == [path for path, _ in expected]


@pytest.mark.parametrize("length", [2, 9, 23])
def test_a_dynamic_tree_is_the_one_of_the_definition(eagle: Eagle, length: int) -> None:
    ids, features = random_context(length, eagle.width, length)
    (answer,) = draft(eagle.new_engine(), request(ids, features, width=3, max_depth=4, max_nodes=10))
    expected = dynamic_tree(lambda path: eagle.log_q(ids, features, path), top_k=3, levels=4, max_nodes=10)
    assert same_dynamic(answer, expected)
    assert answer.cached_len == length - 1


def test_a_static_tree_takes_each_node_s_ranks(eagle: Eagle) -> None:
    ids, features = random_context(11, eagle.width)
    (answer,) = draft(eagle.new_engine(), request(ids, features, choices=EAGLE_TREE, max_depth=9))
    found: list[Path_] = [()]
    for rank, parent in zip(EAGLE_TREE.tokens.tolist(), EAGLE_TREE.parents.tolist(), strict=True):
        best = np.argsort(-eagle.log_q(ids, features, found[parent]), kind="stable")
        found.append((*found[parent], int(best[rank])))
    assert paths_of(answer) == found[1:]


def test_a_call_that_names_no_shape_gets_the_head_s_own_tree(eagle: Eagle) -> None:
    ids, features = random_context(11, eagle.width)
    named, unnamed = (request(ids, features, choices=choices, max_depth=9) for choices in (EAGLE_TREE, None))
    (one,), (other,) = draft(eagle.new_engine(), named), draft(eagle.new_engine(), unnamed)
    assert len(paths_of(one)) == 25
    assert sorted(paths_of(one)) == sorted(paths_of(other))


def test_the_head_s_own_tree_is_cut_to_its_likeliest_nodes_not_to_its_first_levels(eagle: Eagle) -> None:
    ids, features = random_context(11, eagle.width)
    (answer,) = draft(eagle.new_engine(), request(ids, features, max_nodes=8, max_depth=9))
    assert np.bincount(answer.tree.depths)[1:].tolist() == [2, 3, 1, 1, 1]


def test_calls_of_one_request_go_on_from_its_cache(eagle: Eagle) -> None:
    """Entries written while drafting are replaced by those of true features, whatever was accepted."""
    engine = eagle.new_engine()
    ids, features = random_context(30, eagle.width, 5)
    sent = start = 0
    for length in (7, 8, 12, 13, 19, 30):
        rows = features[start : length - 1]
        (answer,) = draft(engine, request(ids[:length], rows, start=start, sent=sent, width=3, max_nodes=8))
        fresh = dynamic_tree(lambda path, n=length: eagle.log_q(ids[:n], features, path), 3, 4, 8)
        assert same_dynamic(answer, fresh)
        sent, start = length, answer.cached_len
        assert start == length - 1


def test_requests_that_share_a_pass_do_not_see_one_another(eagle: Eagle) -> None:
    contexts = [random_context(length, eagle.width, length) for length in (3, 14, 8, 21)]
    calls = [
        request(ids, rows, sequence_id=place, width=1 + place, max_depth=1 + place)
        for place, (ids, rows) in enumerate(contexts, start=1)
    ]
    together = draft(eagle.new_engine(), *calls)
    alone = [draft(eagle.new_engine(), call)[0] for call in calls]
    assert [paths_of(a) for a in together] == [paths_of(a) for a in alone]


def test_a_context_that_is_cached_needs_the_newest_features_alone(eagle: Eagle) -> None:
    engine = eagle.new_engine()
    ids, features = random_context(22, eagle.width, 7)
    draft(engine, request(ids, features, width=2, sequence_id=1))
    (asked,) = draft(engine, request(ids, None, width=2, sequence_id=2))
    assert asked.tree.num_nodes == 0
    # Blocks of four slots: twenty tokens are found, whose last entry is of feature 18.
    assert asked.cached_len == 19
    again = request(ids, features[19:], start=19, sent=21, width=2, sequence_id=2)
    (cold,) = draft(eagle.new_engine(), request(ids, features, width=2))
    assert paths_of(draft(engine, again)[0]) == paths_of(cold)


def test_another_salt_shares_nothing(eagle: Eagle) -> None:
    engine = eagle.new_engine()
    ids, features = random_context(22, eagle.width, 7)
    draft(engine, request(ids, features, width=2, sequence_id=1))
    (asked,) = draft(engine, request(ids, None, width=2, sequence_id=2, salt="x"))
    assert asked.cached_len == 0


def test_features_that_begin_too_late_are_asked_for_again(eagle: Eagle) -> None:
    engine = eagle.new_engine()
    ids, features = random_context(12, eagle.width)
    (answer,) = draft(engine, request(ids, features[4:], start=4, width=2))
    assert (answer.tree.num_nodes, answer.cached_len) == (0, 0)
    (answer,) = draft(engine, request(ids, features, sent=11, width=2))
    assert answer.tree.num_nodes > 0


def test_features_that_do_not_reach_the_root_draft_nothing(eagle: Eagle) -> None:
    ids, features = random_context(12, eagle.width)
    (answer,) = draft(eagle.new_engine(), request(ids, features[:-1], width=2))
    assert answer.tree.num_nodes == 0


def test_a_hole_keeps_its_positions_and_is_seen_by_nobody(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.heads.engines.eagle.MAX_FEATURE_ROWS", 6)
    engine = eagle.new_engine()
    ids, features = random_context(18, eagle.width, 3)
    for length, start, sent in ((14, 7, 0), (18, 13, 14)):
        call = request(ids[:length], features[start : length - 1], start=start, sent=sent, width=3, max_nodes=9)
        (answer,) = draft(engine, call)
        seen = list(range(7, length - 1))
        expected = dynamic_tree(lambda path, n=length, s=seen: eagle.log_q(ids[:n], features, path, s), 3, 4, 9)
        assert same_dynamic(answer, expected)
    (other,) = draft(engine, request(ids, None, sequence_id=2))
    assert other.cached_len == 0  # nothing behind a hole is published


def test_a_restarted_engine_does_not_know_the_sequence(eagle: Eagle) -> None:
    ids, features = random_context(9, eagle.width)
    (answer,) = draft(eagle.new_engine(), request(ids, features, sent=5))
    assert isinstance(answer, UnknownSequence)


def test_features_of_another_width_are_refused(eagle: Eagle) -> None:
    ids, features = random_context(9, eagle.width + 1)
    (answer,) = draft(eagle.new_engine(), request(ids, features))
    assert isinstance(answer, EngineError)
    assert str(eagle.width + 1) in str(answer)


def test_at_the_head_s_limit_nothing_is_drafted(eagle: Eagle) -> None:
    limit = eagle.head.config.max_position_embeddings
    engine = EagleEngine(eagle.head, memory_mb=4, block_tokens=16, native=eagle.native)
    for length in (limit, limit + 1, limit + 40):
        ids, features = random_context(length, eagle.width)
        (answer,) = draft(engine, request(ids, features, width=2))
        assert isinstance(answer, RequestError), "so that it is not asked again"
        assert f"limit, {limit} positions" in str(answer)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, seed=77), Sampling(0.8, seed=77, rule=Rule.REJECTION)], ids=str
)
def test_children_are_ranked_by_the_law_of_the_rule(eagle: Eagle, sampling: Sampling) -> None:
    """Where the target picks an argmax by a sharpened one, under `coupled` with the target's own noise."""
    ids, features = random_context(10, eagle.width)

    def scores(path: Path_) -> np.ndarray:
        log_q = oracle.log_softmax(eagle.log_q(ids, features, path) / (sampling.temperature or 1.0))
        if sampling.rule is not Rule.COUPLED:
            return log_q
        if not sampling.greedy:
            place = len(ids) + len(path)
            log_q = log_q + noise.gumbel(77, place, np.arange(VOCAB_SIZE), noise.Stream.TARGET)
        return oracle.log_softmax(log_q / 0.3)

    call = request(ids, features, sampling=sampling, width=3, max_depth=3, max_nodes=9, sharpness=0.3)
    assert same_dynamic(draft(eagle.new_engine(), call)[0], dynamic_tree(scores, top_k=3, levels=3, max_nodes=9))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle", {"bias": False}),
        ("eagle", {"qkv_bias": True, "file": "safetensors"}),
        ("eagle", {"dtype": "float16", "changes": {"rope_theta": 500000.0}}),
        ("eagle3", {"draft_vocab_size": VOCAB_SIZE}),
        ("eagle3", {"layer_prefix": "layers.0.", "file": "safetensors"}),
        ("eagle3", {"hidden_size": 64}),
        ("eagle3", {"changes": {"head_dim": 16}}),
    ],
)
def test_variants_of_the_published_layouts(tmp_path: Path, target: Path, kind: str, options: dict[str, Any]) -> None:
    head = Eagle(kind, tmp_path, target, **options)
    ids, features = random_context(9, head.width)
    (answer,) = draft(head.new_engine(), request(ids, features, width=2, max_depth=3, max_nodes=6))
    assert same_dynamic(answer, dynamic_tree(lambda path: head.log_q(ids, features, path), 2, 3, 6))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "num_layers": 2, "repeated_block": False, "file": "pt"},
        {"config_num_heads": 2, "dtype": "float16"},
        {"lm_heads": False},
    ],
)
def test_medusa_says_what_its_equations_say(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    heads = load("medusa", make_head("medusa", tmp_path, **options), target)
    h = np.random.default_rng(1).normal(0, 1, HIDDEN_SIZE)
    expected = oracle.medusa_logits(oracle.read_tensors(tmp_path), h, tables(target)[1])
    logits = torch.stack([head(torch.from_numpy(h)) for head in heads])
    assert np.abs(logits.numpy() - expected).max() < 1e-9


def test_medusa_crosses_its_heads_into_the_tree_of_the_choices(tmp_path: Path, target: Path) -> None:
    engine = MedusaEngine(load("medusa", make_head("medusa", tmp_path), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    choices = tree_of_choices(published_choices("medusa_mc_sim_7b_63"))
    calls = [request(ids, features[-1:], start=4, sequence_id=n, choices=choices, max_nodes=63) for n in (1, 2)]
    h = features[-1].astype(np.float32).astype(np.float64)
    best = np.argsort(-oracle.medusa_logits(oracle.read_tensors(tmp_path), h, None), axis=-1)
    expected = [tuple(int(best[k, rank]) for k, rank in enumerate(path)) for path in choices.paths[1:]]
    assert [paths_of(answer) for answer in draft(engine, *calls)] == [expected, expected]


def test_medusa_s_tree_ends_with_its_last_head(tmp_path: Path, target: Path) -> None:
    engine = MedusaEngine(load("medusa", make_head("medusa", tmp_path, num_heads=2), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    (answer,) = draft(engine, request(ids, features[-1:], start=4, choices=TokenTree.chain([0, 0, 0, 0])))
    assert answer.tree.num_nodes == 2


@pytest.mark.parametrize("options", [{}, {"exit_dim": 48, "num_layers": 2}, {"rnn": False, "file": "pt"}])
def test_redrafter_s_tree_is_its_beams_prefixes(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    engine = RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path, **options), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    tensors, config = oracle.read_tensors(tmp_path), oracle.read_config(tmp_path)
    h = features[-1].astype(np.float32).astype(np.float64)
    model = (tensors, config, tables(target)[0], h, ids[-1])

    def score(path: Path_) -> float:
        return sum(oracle.redrafter_log_probs(*model, path[:n])[path[n]] for n in range(len(path)))

    beams = oracle.redrafter_beams(*model, 4, 3)
    best_first = sorted({path[:n] for path, _ in beams for n in (1, 2, 3)}, key=score, reverse=True)
    for max_nodes in (60, len(best_first) - 2, 3):
        call = request(ids, features[-1:], start=4, width=4, max_depth=3, max_nodes=max_nodes)
        assert paths_of(draft(engine, call)[0]) == best_first[:max_nodes]


#: Halvings of probability from a path to each of its tokens; what is not named cannot follow.
HALVINGS: dict[Path_, dict[int, int]] = {
    (): {5: 1, 6: 2, 8: 6},
    (5,): {7: 1, 3: 3},
    (6,): {4: 5},
    (8,): {1: 1},
    (5, 7): {2: 1, 9: 2},
    (5, 3): {2: 1},
    (6, 4): {0: 1},
}


def grown_by_hand(max_nodes: int, beam_search: bool) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree of three levels, three candidates wide, under `HALVINGS`."""
    growing = DynamicTree(3, max_nodes, 3, beam_search)
    while growing.frontier:
        children = [HALVINGS[tuple(growing.tokens[node] for node in growing.path(n))] for n in growing.frontier]
        ids = [[*row, -1, -1, -1][:3] for row in children]
        scores = [[*(-float(cost) for cost in row.values()), *[-np.inf] * 3][:3] for row in children]
        growing.add_children(np.array(ids, np.int32), np.array(scores))
    tree = growing.token_tree()
    return tree.tokens.tolist(), tree.parents.tolist()


@pytest.mark.parametrize("max_nodes", [60, 6, 5, 4, 3, 2, 1])
def test_beams_packed_by_hand(max_nodes: int) -> None:
    # Level 1 holds 5 (1), 6 (2), 8 (6); level 2 holds 57 (2), 53 (4), 64 (7; 81 ties and came later); the last beams
    # are 572 (3), 579 (4), 532 (5), and not 640 (8). 6, the second likeliest of all, is on none of them. In order, the
    # tie of 53 and 579 going to the smaller depth: 5, 57, 572, 53, 579, 532.
    tokens, parents = [5, 7, 2, 3, 9, 2], [0, 1, 2, 1, 2, 4]
    assert grown_by_hand(max_nodes, beam_search=True) == (tokens[:max_nodes], parents[:max_nodes])


@pytest.mark.parametrize("max_nodes", [60, 11, 10, 9, 7, 4, 3, 2, 1])
def test_a_dynamic_tree_ranked_by_hand(max_nodes: int) -> None:
    # The same levels; all eleven candidates are ranked anew: 5 (1), 6 and 57 (2), 572 (3), 53 and 579 (4), 532 (5),
    # 8 (6), 64 and 81 (7, in this order), 640 (8). Ties go to the smaller depth, then to the one that came first.
    tokens, parents = [5, 6, 7, 2, 3, 9, 2, 8, 4, 1, 0], [0, 0, 1, 3, 1, 3, 5, 0, 2, 8, 9]
    assert grown_by_hand(max_nodes, beam_search=False) == (tokens[:max_nodes], parents[:max_nodes])


def test_beams_share_prefixes_not_tokens() -> None:
    # Beams 5-7-2 and 8-7-2 agree from their second token on, which is no prefix; 5-7-9 shares two tokens with the
    # first. Halvings: 5 (1), 8 (1.5), 57 (2), 87 (2.5), 572 (3), 872 (3.5), 579 (4).
    growing = DynamicTree(3, 60, 3, beam_search=True)
    growing.add_children(np.array([[5, 8, 6]], np.int32), np.array([[-1.0, -1.5, -50.0]]))
    growing.add_children(np.array([[7, 0, 1]] * 3, np.int32), np.array([[-1.0, -70.0, -71.0]] * 3))
    growing.add_children(
        np.array([[2, 9, 1]] * 3, np.int32), np.array([[-1.0, -2.0, -9.0], [-1.0, -8.0, -9.0], [-1.0] * 3])
    )
    tree = growing.token_tree()
    assert not growing.frontier
    assert tree.tokens.tolist() == [5, 8, 7, 7, 2, 2, 9]
    assert tree.parents.tolist() == [0, 0, 1, 2, 3, 4, 3]
    assert tree.mask.tolist() == [[own[: len(other)] == other for other in tree.paths] for own in tree.paths]


def test_a_head_without_the_newest_state_drafts_nothing(tmp_path: Path, target: Path) -> None:
    engine = RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    for call in (request(ids, None, width=2), request(ids, features[-1:], start=3, width=2)):
        (answer,) = draft(engine, call)
        assert (answer.tree.num_nodes, answer.cached_len) == (0, 5)


def test_requests_of_all_kinds_share_a_pass_without_harm(tmp_path: Path, target: Path) -> None:
    """Medusa and ReDrafter, mixed temperatures, seeds, lengths and shapes: together as alone."""
    engines: list[Any] = [
        MedusaEngine(load("medusa", make_head("medusa", tmp_path / "m"), target)),
        RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path / "r"), target)),
    ]
    samplings = [
        Sampling(),
        Sampling(0.9, seed=3),
        Sampling(1.2, top_k=2, seed=4),
        Sampling(0.7, seed=3, rule=Rule.REJECTION),
    ]
    for engine in engines:
        calls = []
        for number, sampling in enumerate(samplings * 2):
            ids, features = random_context(5 + number, HIDDEN_SIZE, number)
            shape: dict[str, Any] = (
                {"width": 1 + number % 3} if number < 4 else {"choices": tree_of_choices([[0, 0], [1, 0], [2]])}
            )
            shape |= {"start": 3 + number, "sequence_id": number + 1, "sampling": sampling, "max_depth": 3}
            calls.append(request(ids, features[-1:], **shape))
        together = [paths_of(answer) for answer in draft(engine, *calls)]
        assert together == [paths_of(draft(engine, call)[0]) for call in calls]
        assert len(set(map(tuple, together))) == len(together)


def test_medusa_and_redrafter_use_the_target_s_noise_at_each_token_s_place(tmp_path: Path, target: Path) -> None:
    ids, features = random_context(6, HIDDEN_SIZE)
    sampling = Sampling(1.0, seed=9)
    h = features[-1].astype(np.float32).astype(np.float64)
    medusa, redrafter = make_head("medusa", tmp_path / "m"), make_head("redrafter", tmp_path / "r")

    def best(logits: np.ndarray, depth: int) -> int:
        noisy = oracle.log_softmax(logits) + noise.gumbel(9, 6 + depth, np.arange(VOCAB_SIZE), noise.Stream.TARGET)
        return int(noisy.argmax())

    chain = TokenTree.chain([0, 0, 0])
    (answer,) = draft(
        MedusaEngine(load("medusa", medusa, target)),
        request(ids, features[-1:], start=4, sampling=sampling, choices=chain),
    )
    logits = oracle.medusa_logits(oracle.read_tensors(medusa), h)
    assert answer.tree.tokens.tolist() == [best(logits[k], k) for k in range(3)]

    (answer,) = draft(
        RedrafterEngine(load("redrafter", redrafter, target)),
        request(ids, features[-1:], start=4, sampling=sampling, width=1, max_depth=3),
    )
    path: list[int] = []
    for depth in range(3):
        tensors, config = oracle.read_tensors(redrafter), oracle.read_config(redrafter)
        path.append(best(oracle.redrafter_logits(tensors, config, tables(target)[0], h, ids[-1], path), depth))
    assert answer.tree.tokens.tolist() == path


def test_tokens_outside_the_draft_s_law_are_not_drafted(eagle: Eagle) -> None:
    ids, features = random_context(9, eagle.width)
    sampling = Sampling(1.0, top_k=2, seed=1)
    dynamic, static = draft(
        eagle.new_engine(),
        request(ids, features, sampling=sampling, width=4, max_depth=2),
        request(ids, features, sampling=sampling, choices=tree_of_choices([[0], [1], [2], [2, 0]]), sequence_id=2),
    )
    assert np.bincount(dynamic.tree.depths)[1:].tolist() == [2, 4]
    assert static.tree.num_nodes == 2


def test_two_holes_become_one(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.heads.engines.eagle.MAX_FEATURE_ROWS", 6)
    engine = eagle.new_engine()
    ids, features = random_context(30, eagle.width, 3)
    for length, start, sent in ((14, 7, 0), (30, 23, 14)):
        rows = features[start : start + 6] if length == 14 else features[start:]
        call = request(ids[:length], rows, start=start, sent=sent, width=3, max_nodes=9)
        (answer,) = draft(engine, call)
    seen = list(range(23, 29))
    assert same_dynamic(answer, dynamic_tree(lambda path: eagle.log_q(ids, features, path, seen), 3, 4, 9))


def test_numbers_that_are_none_harm_nobody(eagle: Eagle) -> None:
    """A block once written with them would carry them into other requests, masked or not."""
    engine = eagle.new_engine()
    ids, features = random_context(30, eagle.width)
    for number, bad in enumerate((np.nan, np.inf, -np.inf), start=1):
        (answer,) = draft(engine, request(ids, np.where(features > 0, bad, features), sequence_id=number, width=2))
        assert isinstance(answer, EngineError) and "not finite" in str(answer)
    (answer,) = draft(engine, request(ids, features, sequence_id=9, width=3, max_nodes=9))
    assert same_dynamic(answer, dynamic_tree(lambda path: eagle.log_q(ids, features, path), 3, 4, 9))


def test_foreign_ids_are_refused(eagle: Eagle) -> None:
    ids, features = random_context(9, eagle.width)
    (answer,) = draft(eagle.new_engine(), request([*ids[:-1], VOCAB_SIZE], features, width=2))
    assert isinstance(answer, RequestError)


@pytest.mark.parametrize("room", [{"max_nodes": 0}, {"max_depth": 0}])
def test_without_room_nothing_is_drafted_and_nobody_is_harmed(eagle: Eagle, room: dict[str, int]) -> None:
    ids, features = random_context(9, eagle.width)
    calls = [request(ids, features, choices=EAGLE_TREE, **room), request(ids, features, sequence_id=2, width=2)]
    none, some = draft(eagle.new_engine(), *calls)
    assert none.tree.num_nodes == 0 and some.tree.num_nodes > 0


def test_long_contexts_take_turns(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.heads.engines.base.MAX_PASS_ROWS", 20)
    engine, answers = eagle.new_engine(), []
    contexts = [random_context(length, eagle.width, length) for length in (12, 9, 40, 5)]
    jobs = [
        EngineCall(request(ids, rows, sequence_id=n, width=2), 1e12, lambda answer, n=n: answers.append(n))
        for n, (ids, rows) in enumerate(contexts)
    ]
    passes = []
    while jobs:
        before = len(jobs)
        jobs = engine.advance(jobs)
        passes.append(before - len(jobs))
    assert (passes, answers) == ([2, 1, 1], [0, 1, 2, 3])
    assert (engine.progress.num_passes, engine.progress.num_calls) == (3, 4)


def test_a_pool_that_is_full_is_said_to_be(eagle: Eagle) -> None:
    engine = EagleEngine(eagle.head, memory_mb=1, block_tokens=512, native=eagle.native)
    ids, features = random_context(9, eagle.width)
    answers = [draft(engine, request(ids, features, sequence_id=n, width=2, salt=str(n)))[0] for n in range(1, 12)]
    assert not isinstance(answers[0], Unavailable)
    assert isinstance(answers[-1], Unavailable)


@pytest.mark.parametrize(("width", "max_nodes"), [(3, 5), (8, 24), (2, 60)])
def test_what_can_never_be_kept_is_not_expanded(width: int, max_nodes: int) -> None:
    """The tree is the same; the work is bounded by max_nodes."""
    rng = np.random.default_rng(width)
    log_q: dict[Path_, np.ndarray] = {}

    def scores(path: Path_) -> np.ndarray:
        if path not in log_q:
            log_q[path] = oracle.log_softmax(rng.normal(0, 2, 32))
        return log_q[path]

    tree, num_expanded = DynamicTree(width, max_nodes, 6), 0
    while tree.frontier:
        num_expanded += len(tree.frontier)
        paths = [tuple(tree.tokens[node] for node in tree.path(n)) for n in tree.frontier]
        best = [np.argsort(-scores(path), kind="stable")[:width] for path in paths]
        ranked = np.array([scores(path)[row] for path, row in zip(paths, best, strict=True)])
        tree.add_children(np.array(best, np.int32), ranked)
    assert tree.token_tree().paths[1:] == [path for path, _ in dynamic_tree(scores, width, 6, max_nodes)]
    assert num_expanded <= 1 + max_nodes * 2


class SlowClock:
    """A clock by which every look at the logits takes a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, head: Any) -> None:
        self.now_s = 100.0
        logits = head.logits

        def slow(*args: Any) -> Any:
            self.now_s += 0.1
            return logits(*args)

        monkeypatch.setattr(drafts.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(head, "logits", slow)

    def depths(self, engine: Any, *waited_s: float, **shape: Any) -> list[int]:
        """Return how deep the trees of calls become that are given a second and have waited so long in the queue."""
        answers: list[Any] = []
        jobs = []
        for number, waited in enumerate(waited_s, start=1):
            made = request(sequence_id=number, max_depth=9, **shape)
            jobs.append(EngineCall(made, self.now_s - waited + 1.0, answers.append, self.now_s - waited))
        assert engine.advance(jobs) == []
        return [max(answer.tree.depths) for answer in answers]


def test_a_draft_stops_growing_before_it_is_late_or_takes_the_time_of_the_calls_behind_it(
    torch_eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (ids, features) = SlowClock(monkeypatch, torch_eagle.head), random_context(11, torch_eagle.width)
    assert clock.depths(torch_eagle.new_engine(), 0.0, 0.65, 0.95, ids=ids, features=features, width=2) == [5, 2, 1]
    assert clock.depths(
        torch_eagle.new_engine(), 0.0, ids=ids, features=features, choices=TokenTree.chain([0] * 9)
    ) == [5]


def test_a_long_context_to_read_is_not_taken_for_a_long_level(
    torch_eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (ids, features) = SlowClock(monkeypatch, torch_eagle.head), random_context(11, torch_eagle.width)
    fuse = torch_eagle.head.fuse

    def slow(features: Any) -> Any:
        clock.now_s += 0.25
        return fuse(features)

    monkeypatch.setattr(torch_eagle.head, "fuse", slow)
    assert clock.depths(torch_eagle.new_engine(), 0.0, ids=ids, features=features, width=2) == [2]


def test_beams_stop_growing_before_they_are_late(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load("redrafter", make_head("redrafter", tmp_path), target)
    clock, (ids, features) = SlowClock(monkeypatch, head), random_context(11, HIDDEN_SIZE)
    assert clock.depths(RedrafterEngine(head), 0.0, 0.65, ids=ids, features=features, width=2) == [5, 2]


def test_ranks_are_those_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few candidates a row has, as long as they are among them."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 4
    ids = torch.arange(5000) * 2
    samplings = [Sampling(), Sampling(0.3, seed=3), Sampling(0.7, seed=4, rule=Rule.REJECTION)]
    few = ranking.rank(logits, [5, 6, 7], samplings, 4, ids)
    monkeypatch.setattr(ranking, "CANDIDATES", 5000)
    every = ranking.rank(logits, [5, 6, 7], samplings, 4, ids)
    assert few.ids.tolist() == every.ids.tolist()
    assert torch.allclose(few.scores, every.scores, atol=0.04)
