"""The engine of EAGLE heads and its cache, against forward passes written from the equations by another hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.reference import noise
from orchestrator.core.errors import RequestError
from orchestrator.core.sampling_params import Rule, Sampling
from runtime.models.heads.engines.eagle import EagleEngine
from tests.support import heads_oracle as oracle
from tests.support.dynamic_tree import dynamic_tree
from tests.support.eagle_heads import EAGLE_TREE, Eagle, Path_, random_context, same_dynamic
from tests.support.heads import (
    draft,
    paths_of,
    request,
)
from tests.support.tiny_models import VOCAB_SIZE


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
    """KV rows written while drafting are replaced by those of the target's own features, whatever was accepted."""
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
    # Blocks of four slots: twenty tokens are found, whose last KV row is made of feature 18.
    assert asked.cached_len == 19
    again = request(ids, features[19:], start=19, sent=21, width=2, sequence_id=2)
    (cold,) = draft(eagle.new_engine(), request(ids, features, width=2))
    assert paths_of(draft(engine, again)[0]) == paths_of(cold)


def test_features_that_begin_too_late_are_asked_for_again(eagle: Eagle) -> None:
    engine = eagle.new_engine()
    ids, features = random_context(12, eagle.width)
    (answer,) = draft(engine, request(ids, features[4:], start=4, width=2))
    assert (answer.tree.num_nodes, answer.cached_len) == (0, 0)
    (answer,) = draft(engine, request(ids, features, sent=11, width=2))
    assert answer.tree.num_nodes > 0


def test_a_hole_keeps_its_positions_and_is_not_attended_to(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.models.heads.engines.eagle.MAX_FEATURE_ROWS", 6)
    engine = eagle.new_engine()
    ids, features = random_context(18, eagle.width, 3)
    for length, start, sent in ((14, 7, 0), (18, 13, 14)):
        call = request(ids[:length], features[start : length - 1], start=start, sent=sent, width=3, max_nodes=9)
        (answer,) = draft(engine, call)
        seen = list(range(7, length - 1))
        expected = dynamic_tree(lambda path, n=length, s=seen: eagle.log_q(ids[:n], features, path, s), 3, 4, 9)
        assert same_dynamic(answer, expected)
    (other,) = draft(engine, request(ids, None, sequence_id=2))
    assert other.cached_len == 0  # nothing after a hole is published


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


def test_foreign_ids_are_refused(eagle: Eagle) -> None:
    ids, features = random_context(9, eagle.width)
    (answer,) = draft(eagle.new_engine(), request([*ids[:-1], VOCAB_SIZE], features, width=2))
    assert isinstance(answer, RequestError)


@pytest.mark.parametrize("room", [{"max_nodes": 0}, {"max_depth": 0}])
def test_call_without_room_drafts_nothing_and_does_not_affect_others(eagle: Eagle, room: dict[str, int]) -> None:
    ids, features = random_context(9, eagle.width)
    calls = [request(ids, features, choices=EAGLE_TREE, **room), request(ids, features, sequence_id=2, width=2)]
    none, some = draft(eagle.new_engine(), *calls)
    assert none.tree.num_nodes == 0 and some.tree.num_nodes > 0
