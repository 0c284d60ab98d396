"""What TensorRT-LLM's source says, each a rule of the stand-in, and what our client makes of it.

The items are the corrections that were found by reading the source again; docs/tensorrt-llm-source.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.confidence import g_test
from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, EngineError, RequestError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import Rule, as_float32
from orchestrator.core.types import Distribution, EngineSpeculation, StepOptions
from runtime.engine.sampling import distribution
from runtime.trtllm.executor.adapters import draft_logits
from runtime.trtllm.executor.build_executor import build_draft, build_target
from tests.standin.engine_folder import SPEC, make_engine, tree_of
from tests.support.clients import until
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, own_text, submit
from tests.support.executor import (
    GREEDY,
    LIMIT_S,
    LIMITS,
    PROMPT,
    config_of,
    proposer_of,
    request,
    sampled,
    serving,
    standin,
)
from tests.support.tiny_models import VOCAB_SIZE

SPECULATION = StepOptions(engine_speculation=EngineSpeculation(8))


def planned(**spec: Any) -> dict[str, Any]:
    """Return a plan whose spec differs from the usual one."""
    return {"servers": {}, "spec": SPEC | spec}


# Loading


def test_external_drafts_without_block_reuse_are_refused_before_the_library_does(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"demands that KV blocks are reused \(key prefix_sharing: must be true\)"):
        build_target(config_of(folder, prefix_sharing=False))


def test_prefix_sharing_may_be_off_where_no_drafts_are_verified(checkpoint: Path, tmp_path: Path) -> None:
    with serving(make_engine(tmp_path / "plain", checkpoint, mode="", max_draft_len=0), prefix_sharing=False) as client:
        assert not standin(client).engine.reuses


@pytest.mark.parametrize("mode", ["lookahead_decoding", "medusa", "eagle"])
def test_decoding_configuration_names_its_mode(checkpoint: Path, tmp_path: Path, mode: str) -> None:
    """decodingConfig.cpp: "EagleConfig is set, but DecodingMode is not set"."""
    with serving(make_engine(tmp_path / mode, checkpoint, mode=mode)) as client:
        name = standin(client)._config.decoding_config.decoding_mode.name
        assert name.casefold() == mode.removesuffix("_decoding")


def test_prompt_longer_than_a_pass_is_computed_in_parts(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint)
    with serving(folder) as client:
        standin(client).engine.max_num_tokens = 64
        assert ask(client, request([1] * 100)).next_token == own_text(checkpoint, [1] * 100, 1)[0]
        standin(client).engine.is_chunked = False  # the default of the bindings
        with pytest.raises(EngineError, match=r"Prompt length \(100\) exceeds maximum input length \(64\)"):
            ask(client, request([1] * 100))


def test_lookahead_engine_for_more_than_eight_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, mode="lookahead_decoding", max_batch_size=9)
    with pytest.raises(ConfigError, match="stops drafting with Lookahead above 8"):
        build_target(config_of(folder))


def test_lookahead_of_nine_requests_would_not_draft(checkpoint: Path, tmp_path: Path) -> None:
    """What the check above prevents: the library switches it off without a word."""
    folder = make_engine(tmp_path / "engine", checkpoint, mode="lookahead_decoding")
    with serving(folder) as client:
        executor = standin(client)
        executor.engine.max_batch_size = 9
        executor.gate.clear()
        before = executor.num_passes
        waiting = [submit(client, request(PROMPT, options=SPECULATION, sequence_id=n)) for n in range(2, 11)]
        executor.gate.set()
        for queue in waiting:
            assert queue.get(timeout=LIMIT_S).engine_speculation
        assert not executor.engine.is_lookahead_on
        until(lambda: executor.num_passes == before + 8, "a token a pass, eight in all")


# Trees


def test_shallow_tree_of_one_client_ends_no_other_s_text(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    """createNewDecoderRequests.cpp checks the depth inside a pass, and the error ends every request in it."""
    with serving(make_engine(tmp_path / "engine", checkpoint, mode="eagle")) as client:
        executor, shallow = standin(client), ((0,), (1,), (0, 0))
        executor.gate.clear()
        sound = submit(client, request(PROMPT, options=SPECULATION, sequence_id=2))
        wrong = StepOptions(engine_speculation=EngineSpeculation(8, choices=shallow))
        with pytest.raises(RequestError, match="2 levels, the engine needs exactly 4"):
            ask(client, request(PROMPT, options=wrong, sequence_id=3))
        executor.gate.set()
        answer = sound.get(timeout=LIMIT_S)
        assert not isinstance(answer, Exception) and answer.next_token in greedy
        # What it prevents:
        executor.gate.clear()
        sound = submit(client, request(PROMPT, options=SPECULATION, sequence_id=4))
        api = client._adapter._api
        executor.enqueue_request(api.Request(PROMPT, 8, eagle_config=api.EagleConfig([list(p) for p in shallow])))
        executor.gate.set()
        assert "EAGLE-1 requires Eagle-tree depth" in str(sound.get(timeout=LIMIT_S))


@pytest.mark.parametrize(
    ("mode", "spec", "words"),
    [
        ("eagle", {"eagle_layers": 5}, "own tree has 4 levels"),
        ("eagle", {"eagle_non_leaves": 9}, "own tree has 4 levels with up to 10 nodes"),
        ("medusa", {"medusa_heads": 3}, "needs medusa_heads 4 at least"),
        ("eagle", {"choices": str(tree_of(63)), "eagle_layers": 5}, "has 4 levels, the engine needs exactly 5"),
    ],
)
def test_engine_s_own_tree_must_fit_it(
    checkpoint: Path, tmp_path: Path, mode: str, spec: dict[str, Any], words: str
) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, mode=mode, max_draft_len=63, plan=planned(**spec))
    with pytest.raises(ConfigError, match=words):
        build_target(config_of(folder))


# Requests


def test_output_is_never_shortened_without_a_word(
    folder: Path, client: Any, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llmRequest.cpp wants room for the drafts twice; near the end of the sequence fewer drafts are sent."""
    asked: list[Any] = []
    validate = standin(client).engine.validate

    def noted(payload: Any) -> None:
        before = (payload.max_tokens, len(payload.drafts))
        validate(payload)
        asked.append((*before, payload.max_tokens, len(payload.drafts)))

    monkeypatch.setattr(standin(client).engine, "validate", noted)
    for length in (8, 230, 240, 250, 255):
        ask(client, request([1] * length, [1] * 16))
    assert [(wanted, drafts) for wanted, drafts, _, _ in asked] == [(given, left) for _, _, given, left in asked]
    assert [drafts for _, drafts, _, _ in asked] == [16, 16, 15, 10, 8]


def test_salt_is_refused_where_the_bindings_have_none(
    client: Any, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorrt_llm.bindings import executor as api

    monkeypatch.delattr(api.Request, "cache_salt_id")
    salted = replace(request(PROMPT), delta=delta_of(Context(PROMPT), 0, 1, "mine"))
    with pytest.raises(RequestError, match="cannot keep KV blocks apart by a salt"):
        ask(client, salted)
    assert ask(client, request(PROMPT)).next_token == greedy[0]


# EAGLE-2, and sampling with EAGLE


@pytest.fixture(scope="module")
def eagle2(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(tmp_path_factory.mktemp("eagle2") / "engine", checkpoint, mode="eagle", method="eagle2")


def test_dynamic_tree_is_a_setting_of_the_executor(eagle2: Path, greedy: list[int]) -> None:
    with serving(eagle2) as client:
        told = standin(client)._config.decoding_config.eagle_config
        assert told.use_dynamic_tree and told.dynamic_tree_max_topK == SPEC["eagle_top_k"]
        assert told.eagle_choices is None and told.greedy_sampling
        proposer = proposer_of("eagle2", inside="eagle2")
        text, statistics = decode(EngineTarget(client, 2), proposer, PROMPT, GREEDY, LIMITS)
        assert text == greedy and list(statistics.sources) == ["eagle2"]
        assert statistics.num_draft_tokens == 16 * (statistics.num_steps - 1)
        with pytest.raises(RequestError, match="temperature: it is not established"):
            ask(client, request(PROMPT, sampling=sampled(1.0), options=SPECULATION))


@pytest.mark.parametrize("method", ["eagle", "eagle2"])
def test_sampling_with_eagle_is_typical_acceptance_of_the_whole_engine(
    checkpoint: Path, tmp_path: Path, method: str
) -> None:
    choices = {"choices": str(tree_of(16))} if method == "eagle" else {}
    plan = planned(eagle_posterior=0.2, **choices)
    with serving(make_engine(tmp_path / "engine", checkpoint, mode="eagle", method=method, plan=plan)) as client:
        told = standin(client)._config.decoding_config.eagle_config
        assert not told.greedy_sampling and told.posterior_threshold == as_float32(0.2)
        assert ask(client, request(PROMPT, sampling=sampled(1.0, rule=Rule.TYPICAL), options=SPECULATION))
        with pytest.raises(RequestError, match="temperature 0: this engine is deployed for sampling"):
            ask(client, request(PROMPT, sampling=sampled(rule=Rule.TYPICAL), options=SPECULATION))
        with pytest.raises(RequestError, match="the rule 'engine'"):
            ask(client, request(PROMPT, sampling=sampled(1.0), options=SPECULATION))


@pytest.mark.parametrize("method", ["eagle", "eagle2"])
def test_epsilon_of_a_request_is_sent_beside_the_engine_s_whole_tree(
    checkpoint: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """createNewDecoderRequests.cpp takes a request's EagleConfig instead of the executor's, not beside it."""
    choices = {"choices": str(tree_of(16))} if method == "eagle" else {}
    plan = planned(eagle_posterior=0.2, **choices)
    with serving(make_engine(tmp_path / "engine", checkpoint, mode="eagle", method=method, plan=plan)) as client:
        asked: list[Any] = []
        enqueue = standin(client).enqueue_request
        monkeypatch.setattr(
            standin(client), "enqueue_request", lambda one: asked.append(one.eagle_config) or enqueue(one)
        )
        for epsilon in (as_float32(0.2), 0.5):
            typical = sampled(1.0, rule=Rule.TYPICAL, epsilon=epsilon)
            assert ask(client, request(PROMPT, sampling=typical, options=SPECULATION))
        of_engine = standin(client)._config.decoding_config.eagle_config
        first, second = asked
        assert first is None and second.posterior_threshold == 0.5 and not second.greedy_sampling
        assert second.eagle_choices == of_engine.eagle_choices == (tree_of(16) if method == "eagle" else None)
        assert second.use_dynamic_tree == of_engine.use_dynamic_tree == (method == "eagle2")
        assert second.dynamic_tree_max_topK == of_engine.dynamic_tree_max_topK


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"epsilon": 1.0}, r"typical_epsilon 1: TensorRT-LLM takes 0 to below 1 \(input typical_epsilon\)"),
        (
            {"delta": 0.5},
            r"typical_delta: TensorRT-LLM uses the square root of typical_epsilon \(input typical_delta\)",
        ),
    ],
)
def test_typical_acceptance_that_the_library_lacks_is_refused(
    checkpoint: Path, tmp_path: Path, parameters: dict[str, float], words: str
) -> None:
    plan = planned(eagle_posterior=0.2)
    with serving(make_engine(tmp_path / "engine", checkpoint, mode="eagle", method="eagle2", plan=plan)) as client:
        typical = sampled(1.0, rule=Rule.TYPICAL, **parameters)
        with pytest.raises(RequestError, match=words):
            ask(client, request(PROMPT, sampling=typical, options=SPECULATION))


def test_dynamic_tree_wider_than_the_engine_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    """runtime/eagleBuffers.cpp; the plan refuses it first."""
    plan = planned(eagle_top_k=11)
    folder = make_engine(tmp_path / "engine", checkpoint, mode="eagle", method="eagle2", plan=plan)
    with pytest.raises(ConfigError, match=r"cannot load the engine .* maxNonLeafNodesPerLayer should be greater"):
        build_target(config_of(folder))


# Draft probabilities


def test_draft_logits_are_log_q_in_the_engine_s_columns() -> None:
    q = (Distribution(np.array([1, 3], np.int32), np.array([1.0, 3.0], np.float32)),)
    logits = draft_logits(q, 6)
    assert logits is not None and logits.dtype == torch.float32
    np.testing.assert_allclose(logits.softmax(-1).numpy(), [[0, 0.25, 0, 0.75, 0, 0]], atol=1e-7)
    assert draft_logits((), 6) is None


def test_draft_engine_samples_from_the_q_that_it_answers(folder: Path, draft_checkpoint: Path, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", draft_checkpoint, role="draft", mode="", max_draft_len=0)
    client, _ = build_draft(config_of(folder, draft=str(draft)))
    rejection = sampled(1.5, rule=Rule.REJECTION, seed=3, top_k=5)
    answer = ask(client, DraftRequest(delta_of(Context(PROMPT), 0, 3, ""), rejection, 3, 8))
    assert len(answer.q) == answer.tree.num_nodes == 3
    for each, token in zip(answer.q, answer.tree.tokens, strict=True):
        assert len(each.ids) == 5 and token in each.ids
    first = StepRows(draft_checkpoint).first(PROMPT, 1.5, 5)
    np.testing.assert_allclose(answer.q[0].probs, first[answer.q[0].ids], atol=1e-6)
    greedy = ask(client, DraftRequest(delta_of(Context(PROMPT), 0, 4, ""), sampled(1.5, seed=3), 3, 8))
    assert greedy.q == ()
    client.close()


def test_draft_engine_draws_with_another_seed_than_the_target(
    client: Any, folder: Path, draft_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that depended on the target's own draws would not be samples of q."""
    draft = make_engine(tmp_path / "draft", draft_checkpoint, role="draft", mode="", max_draft_len=0)
    drafter, _ = build_draft(config_of(folder, draft=str(draft)))
    rejection, seeds = sampled(1.5, rule=Rule.REJECTION, seed=3), []
    for executor in (standin(client), standin(drafter)):
        noted = partial(_noting, executor.enqueue_request, seeds)
        monkeypatch.setattr(executor, "enqueue_request", noted)
    ask(client, request(PROMPT, sampling=rejection))
    ask(drafter, DraftRequest(delta_of(Context(PROMPT), 0, 3, ""), rejection, 3, 8))
    drafter.close()
    assert len(set(seeds)) == 2


def _noting(enqueue: Callable[[Any], int], seeds: list[int], asked: Any) -> int:
    seeds.append(asked.sampling_config.seed)
    return enqueue(asked)


class StepRows:
    """The stock model's distribution of the first token."""

    def __init__(self, checkpoint: Path) -> None:
        from benchmarks.stock_model import StockModel

        self._model = StockModel(checkpoint)

    def first(self, ids: list[int], temperature: float, top_k: int = 0) -> Any:
        """Return p, (V,) float64."""
        rows = torch.tensor(self._model.logits(ids))[None]
        return distribution.log_p(rows, [sampled(temperature, top_k=top_k)]).exp().numpy()[0]


def test_rejection_has_the_target_s_law_with_drafts_sampled_from_q(client: Any, checkpoint: Path) -> None:
    """900 first tokens against p, drafts from a q far from it."""
    p = StepRows(checkpoint).first(PROMPT, 2.0)
    ids = np.sort(np.argsort(-p)[[0, 3, 7, 20]]).astype(np.int32)
    q = Distribution(ids, np.array([0.4, 0.1, 0.3, 0.2], np.float32))
    rng, counts, num_accepted = np.random.default_rng(5), np.zeros(VOCAB_SIZE), 0
    for seed in range(900):
        drafted = int(rng.choice(q.ids, p=q.probs))
        step = replace(request(PROMPT, [drafted], sampled(2.0, seed=seed, rule=Rule.REJECTION)), q=(q,))
        answer = ask(client, step)
        num_accepted += bool(answer.path)
        counts[drafted if answer.path else answer.next_token] += 1
    assert g_test(counts, p) > 1e-4
    share = np.minimum(p[ids], q.probs).sum()
    assert abs(num_accepted / 900 - share) < 5 * np.sqrt(share * (1 - share) / 900)
