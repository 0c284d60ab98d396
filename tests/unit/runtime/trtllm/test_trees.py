"""Token trees on a compiled engine, over a stand-in of the library's Session: no engine is run here.

The stand-in computes with the stock model, from the packed bits, the offsets and the KV pool alone; it is compared with
our own engine.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, EngineError
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from orchestrator.deployment.capabilities import capabilities_of
from orchestrator.deployment.config import ServingConfig
from orchestrator.generation.loop import Limits
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.proposers.registry import select_method
from orchestrator.wire.context import delta_of
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.build import build_draft, build_target
from runtime.kv.batch import Segment
from runtime.kv.cache import CacheShape
from runtime.trtllm.trees import build, inputs
from runtime.trtllm.trees.geometry import Geometry, read_geometry
from runtime.trtllm.trees.inputs import Row, context_inputs, groups, step_inputs
from runtime.trtllm.trees.model import PoolCache, is_host
from tests.standin import importable
from tests.standin.engine_folder import make_engine, make_tree_engine
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, make_paged, start_target
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 24
LIMITS = Limits(NUM_TOKENS, 250, 40)
FACTS = json.loads((Path(__file__).resolve().parents[3] / "data/trtllm/engine_inputs.json").read_text())
DRAWN = Sampling(0.9, top_p=0.95, seed=7)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with importable():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree_engine(tmp_path_factory.mktemp("engines") / "target", checkpoint)


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    return ServingConfig(**{"target": str(folder), "engine": build.ENGINE, "kv_memory_mb": 4, **keys})


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Iterator[Any]:
    """Our own engine, exact in float64."""
    engine = start_target(make_paged(checkpoint))
    yield engine
    engine.close()


@pytest.fixture
def hosted(folder: Path) -> Iterator[Any]:
    engine, _ = build_target(config_of(folder))
    yield engine
    engine.close()


def session_of(engine: Any) -> Any:
    """The stand-in behind an engine."""
    return engine._engine.paged.model._session


def proposer_of(method: str, parameters: dict[str, Any]) -> Any:
    materials = ProposerDependencies(
        drafter_client=lambda name: None, vocab_size=VOCAB_SIZE, max_nodes=40, prediction=tuple(PROMPT)
    )
    return select_method(method, json.dumps(parameters), frozenset(), {}).proposer(materials)


def text_of(
    engine: Any, method: str, parameters: dict[str, Any], sampling: Sampling, prompt: list[int] = PROMPT
) -> Any:
    target = EngineTarget(engine, random.randrange(1, 1 << 40))
    text, statistics = decode(target, proposer_of(method, parameters), prompt, sampling, LIMITS)
    target.release()
    return text, statistics.num_steps


# Every method, every rule: the text of our own engine

METHODS = [
    ("none", {}),
    ("prompt_lookup", {"branches": 3}),
    ("suffix", {}),
    ("lookahead", {"window": 3, "ngram": 3, "guesses": 3}),
    ("jacobi", {}),
    ("predicted", {}),
]


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_text_and_steps_are_those_of_the_torch_engine(
    hosted: Any, own: Any, method: str, parameters: dict[str, Any], sampling: Sampling
) -> None:
    assert text_of(hosted, method, parameters, sampling) == text_of(own, method, parameters, sampling)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.TYPICAL])
def test_rules_of_our_own_decide_beside_the_logits(hosted: Any, own: Any, rule: Rule) -> None:
    sampling = Sampling(0.9, seed=3, rule=rule)
    asked = ("predicted", {}, sampling) if rule is Rule.BLOCK else ("prompt_lookup", {"branches": 3}, sampling)
    assert text_of(hosted, *asked) == text_of(own, *asked)


# Random trees, several requests in a pass, several steps in a row


def likely_tree(rng: random.Random, said: list[int], num_nodes: int) -> TokenTree:
    """Grow a tree at random in which the text to come often stands, and seldom as the first child."""
    tokens: list[int] = []
    parents: list[int] = []
    depths, on_text = [0], [True]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(depths))
        right = said[depths[parent]] if depths[parent] < len(said) else 1
        token = right if on_text[parent] and rng.random() < 0.6 else rng.randrange(VOCAB_SIZE)
        if any(t == token and p == parent for t, p in zip(tokens, parents, strict=True)):
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        on_text.append(on_text[parent] and token == right)
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))


WANT = StepOptions(target_tokens=True, logprobs=True, num_top=2)


def assert_same(found: Any, expected: Any) -> None:
    assert (found.path, found.next_token) == (expected.path, expected.next_token)
    assert found.target_tokens.tolist() == expected.target_tokens.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_batches_of_requests_are_decided_as_by_the_torch_engine(
    folder: Path, checkpoint: Path, own: Any, seed: int
) -> None:
    """Four requests share each pass, six steps in a row; paths that skip siblings move KV rows."""
    rng = random.Random(seed)
    paged = build.load_paged(config_of(folder))
    hosted = start_target(paged)
    samplings = [Sampling(), Sampling(0.8, seed=1), Sampling(1.1, top_k=9, seed=2), Sampling(rule=Rule.REJECTION)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))] for _ in samplings]
    truths = [decode(EngineTarget(own, 90 + i), proposer_of("none", {}), p, s, Limits(60, 250, 40))[0]
              for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]  # fmt: skip
    num_branched = 0

    def run(index: int, barrier: threading.Barrier, failures: list[BaseException]) -> None:
        nonlocal num_branched
        try:
            mine, theirs = EngineTarget(hosted, index + 1), EngineTarget(own, 1000 * (seed + 1) + index)
            context, draws = Context(prompts[index]), random.Random(100 * seed + index)
            for _ in range(6):
                said = truths[index][len(context.output) :]
                tree = likely_tree(draws, said, draws.choice([0, 1, 7, 33, 40]))
                barrier.wait(60)
                found = mine.step(context, tree, samplings[index], WANT)
                assert_same(found, theirs.step(context, tree, samplings[index], WANT))
                num_branched += found.path != tuple(range(1, len(found.path) + 1))
                context.commit(found.tokens(tree))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    barrier, failures = threading.Barrier(len(prompts)), []  # type: ignore[var-annotated]
    threads = [threading.Thread(target=run, args=(i, barrier, failures)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    hosted.close()
    assert not failures, failures[0]
    assert num_branched > 0 and {"context", "step"} <= set(paged.model._session.runs)


@pytest.mark.parametrize("wrong", ["mask", "offsets", "blocks"])
def test_stand_in_computes_from_what_it_is_sent(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A wrong bit, depth or block changes the logits: else the tests above would show nothing."""
    paged = build.load_paged(config_of(folder))
    model, pool = paged.model, paged.cache.kv.data_ptr()
    tree, blocks = TokenTree.from_paths([[3, 4], [5, 6], [7]]), [4, 2, 9, 1]
    model._run(context_inputs([Row(PROMPT, 0, blocks, TokenTree.bare())], model.geometry, pool))
    step = [Row([9, *tree.tokens.tolist()], len(PROMPT), blocks, tree)]
    right, again = model._step(step, pool), model._step(step, pool)
    pack, offsets = inputs.pack_trees, inputs.block_offsets

    def broken(trees: list[TokenTree], max_draft_len: int) -> Any:
        tensors = pack(trees, max_draft_len)
        if wrong == "mask":
            tensors["spec_decoding_packed_mask"][-1] |= 2
        if wrong == "offsets":
            tensors["spec_decoding_position_offsets"][:, -1] += 3
        return tensors

    monkeypatch.setattr(inputs, "pack_trees", broken)
    if wrong == "blocks":
        monkeypatch.setattr(inputs, "block_offsets", lambda *given: offsets(*given)[:, :, ::-1].copy())
    assert torch.equal(right, again)
    assert (model._step(step, pool)[-1] - right[-1]).abs().max() > 1e-3


# Long contexts, many requests, shared beginnings


def test_long_contexts_run_in_parts_and_many_requests_in_several_runs(
    checkpoint: Path, own: Any, tmp_path: Path
) -> None:
    sizes = {"max_num_tokens": 48}
    folder = make_tree_engine(tmp_path / "engine", checkpoint, sizes=sizes, max_batch_size=3)
    engine, _ = build_target(config_of(folder, kv_memory_mb=16))
    prompts = [[(7 * i + n) % VOCAB_SIZE for i in range(5 + 20 * n)] for n in range(8)]
    texts: dict[int, Any] = {}

    def run(number: int) -> None:
        texts[number] = text_of(engine, "prompt_lookup", {"branches": 3}, Sampling(), prompts[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    engine.close()
    expected = [text_of(own, "prompt_lookup", {"branches": 3}, Sampling(), prompt) for prompt in prompts]
    assert [texts[number] for number in range(8)] == expected


def test_pass_over_more_than_the_engine_takes_has_the_torch_engine_s_logits(checkpoint: Path, tmp_path: Path) -> None:
    """Eight prompts that come at once, before any is computed: several runs of contexts, and of steps."""
    sizes = {"max_num_tokens": 48}
    folder = make_tree_engine(tmp_path / "engine", checkpoint, sizes=sizes, max_batch_size=3)
    compiled, plain = build.load_paged(config_of(folder)), make_paged(checkpoint)
    tree, found = TokenTree.from_paths([[3, 4], [5, 6], [7]]), []
    for paged in (compiled, plain):
        segments = []
        for n in range(8):
            delta = delta_of(Context([(7 * i + n) % VOCAB_SIZE for i in range(4 + 3 * n)]), 0, n + 1, "")
            segments.append(Segment(paged.sequences.open(delta, 5, 2), 0, delta.prefix_len, tree))
        found.append(paged.forward(segments))
    torch.testing.assert_close(found[0].double(), found[1].double(), atol=1e-4, rtol=1e-4)
    assert compiled.model._session.runs.count("context") > 2 and compiled.model._session.runs.count("step") == 3


def test_shared_beginning_is_found_in_the_blocks_and_changes_nothing(hosted: Any, own: Any) -> None:
    prompt = [(11 * i) % VOCAB_SIZE for i in range(40)]
    step = [StepRequest(delta_of(Context([*prompt, n]), 0, 500 + n, ""), TokenTree.bare(), Sampling(), WANT, 60_000)
            for n in (1, 2)]  # fmt: skip
    first, second = ask(hosted, step[0]), ask(hosted, step[1])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert_same(second, ask(own, step[1]))


def test_grammar_is_obeyed(hosted: Any) -> None:
    sampling = Sampling(logits_options=LogitsOptions(grammar=Grammar("regex", "[ab]{6}c"), end_ids=(0,)))
    text, _ = text_of(hosted, "suffix", {}, sampling)
    assert [token in (1, 2) for token in text[:6]] == [True] * 6 and text[6] == 3


# The inputs, by the table


GEOMETRY = Geometry(CacheShape(3, 2, 8), torch.float64, 4, VOCAB_SIZE, 8, 64, 100, 40)
ROWS = [
    Row([4, 8, 9], 6, [5, 2, 7], TokenTree.from_paths([[8], [9]])),
    Row([1], 0, [3], TokenTree.bare()),
]


@pytest.mark.parametrize("make", [context_inputs, step_inputs])
def test_names_types_and_shapes_are_those_of_the_table(make: Any) -> None:
    tensors = make(ROWS, GEOMETRY, 4096)
    entries = {entry["name"]: entry for entry in (*FACTS["inputs"], *FACTS["other_inputs"])}
    assert tensors.keys() == entries.keys()
    is_step = make is step_inputs
    sizes = {
        "B": 2, "num_tokens": 4, "num_positions": 2 if is_step else 4, "num_rows": 4 if is_step else 2, "layers": 3,
        "max_seq_len": 100, "max_blocks": 25, "ceil((max_draft_len+1)/32)": 2,
        "max_gen_len": 3, "sum(generation_lengths)": 4,
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert tensor.dtype.name.upper() == entries[name]["dtype"], name
        assert list(tensor.shape) == [sizes.get(size, size) for size in entries[name]["shape"]], name
        assert is_host(name) == (entries[name]["device"] == "host"), name


def test_step_says_where_everything_stands() -> None:
    tensors = {name: tensor.tolist() for name, tensor in step_inputs(ROWS, GEOMETRY, 4096).items()}
    assert tensors["input_ids"] == [4, 8, 9, 1]
    assert tensors["position_ids"] == tensors["host_past_key_value_lengths"] == [6, 0]
    assert tensors["sequence_length"] == [9, 1] and tensors["host_request_types"] == [1, 1]
    assert tensors["last_token_ids"] == [1, 2, 3, 4] and tensors["spec_decoding_use"] == [1]
    assert [offsets[:3] for offsets in tensors["kv_cache_block_offsets"][0][0]] == [[30, 12, 42], [31, 13, 43]]
    assert tensors["host_kv_cache_pool_pointers"] == [[4096, 0]]


def test_context_says_where_everything_stands() -> None:
    bare = [row._replace(tree=TokenTree.bare()) for row in ROWS]
    tensors = {name: tensor.tolist() for name, tensor in context_inputs(bare, GEOMETRY, 4096).items()}
    assert tensors["position_ids"] == [6, 7, 8, 0] and tensors["context_lengths"] == [3, 1]
    assert tensors["host_past_key_value_lengths"] == tensors["sequence_length"] == [9, 1]
    assert tensors["last_token_ids"] == [3, 4] and tensors["host_request_types"] == [0, 0]
    assert tensors["spec_decoding_use"] == [0] and tensors["spec_decoding_generation_lengths"] == [1, 1]


def test_groups_hold_what_the_engine_takes() -> None:
    rows = [Row([1] * n, 0, [0], TokenTree.bare()) for n in (30, 30, 10, 60, 1, 1)]
    assert [[len(row.ids) for row in group] for group in groups(rows, GEOMETRY)] == [[30, 30], [10], [60, 1, 1]]
    many = [Row([1], 0, [0], TokenTree.bare())] * 17
    assert [len(group) for group in groups(many, GEOMETRY)] == [8, 8, 1]
    assert list(groups([], GEOMETRY)) == []


def test_moved_slots_are_read_before_any_is_written() -> None:
    cache = PoolCache(GEOMETRY, 1, torch.device("cpu"))
    cache.kv.copy_(torch.arange(cache.kv.numel(), dtype=torch.float64).view(cache.kv.shape))
    before = cache.kv.clone()
    cache.move([5, 9], [4, 5])
    assert cache.kv[1, :, :, :, 0].equal(before[1, :, :, :, 1])
    assert cache.kv[1, :, :, :, 1].equal(before[2, :, :, :, 1])
    cache.kv[1, :, :, :, :2] = before[1, :, :, :, :2]
    assert cache.kv.equal(before)


def test_draft_model_is_an_engine_of_the_executor_s(folder: Path, checkpoint: Path, own: Any, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", checkpoint, role="draft", mode="", max_draft_len=0)
    engine, _ = build_draft(config_of(folder, draft=str(draft)))
    drafted = ask(engine, DraftRequest(delta_of(Context(PROMPT), 0, 3, ""), Sampling(), 3, 8))
    engine.close()
    assert drafted.tree.tokens.tolist() == text_of(own, "none", {}, Sampling())[0][:3]


# What is refused, and what is said


def test_tree_beyond_the_engine_is_that_request_s_error_alone(hosted: Any) -> None:
    wide = TokenTree.from_paths([[n] for n in range(41)])
    with pytest.raises(EngineError, match="a tree has 41 nodes, the engine takes at most 40"):
        ask(hosted, StepRequest(delta_of(Context(PROMPT), 0, 1, ""), wide, Sampling(), StepOptions(), 60_000))
    assert text_of(hosted, "none", {}, Sampling())[1] == NUM_TOKENS


def test_capabilities_are_all_but_hidden_states(folder: Path) -> None:
    served = capabilities_of(config_of(folder))
    assert served.max_nodes == 40 and served.trees and served.target_tokens and served.logprobs
    assert "no output for its hidden states" in served.refusal(
        Sampling(), StepOptions(features_from=0), method="medusa"
    )


def test_loading_says_that_it_is_experimental(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build.load_paged(config_of(folder))
    assert "EXPERIMENTAL: it has never been run on a compiled engine" in caplog.text
    assert "experimental" in build.ENGINE


def test_device_that_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device = 'cuda', but torch sees no CUDA device"):
        build.load_paged(config_of(folder, device="cuda"))


def test_engine_of_several_gpus_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_tree_engine(tmp_path / "engine", checkpoint, num_ranks=2)
    (folder / "rank1.engine").touch()
    with pytest.raises(ConfigError, match="is for 2 GPUs"):
        build.load_paged(config_of(folder))


def test_engine_without_trees_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    plain = make_engine(tmp_path / "engine", checkpoint)
    with pytest.raises(ConfigError, match="is built for draft_tokens_external; trees need an engine for lookahead"):
        build.load_paged(config_of(plain))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"others": {"lora_ranks": "INT32"}}, "are not those of a tree step: lora_ranks"),
        ({"without": ["spec_decoding_use"]}, "are not those of a tree step: spec_decoding_use"),
        ({"others": {"position_ids": "INT64"}}, "input position_ids is INT64, not int32"),
    ],
)
def test_engine_with_other_tensors_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = make_tree_engine(tmp_path / "engine", checkpoint)
    values = json.loads((folder / "rank0.engine").read_text())
    (folder / "rank0.engine").write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=words):
        build.load_paged(config_of(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda config: config["pretrained_config"].update(dtype="int4"),
            "KV cache is int4; allowed: FP8, INT8, float",
        ),
        (lambda config: config["pretrained_config"].pop("head_size"), "has no key 'head_size'"),
        (
            lambda config: config["build_config"]["plugin_config"].update(remove_input_padding=False),
            "need an engine with",
        ),
    ],
)
def test_engine_of_another_make_is_refused(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        read_geometry(tmp_path, build.read_manifest(folder))


def test_quantised_cache_is_of_a_byte(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"]["quantization"]["kv_cache_quant_algo"] = "FP8"
    (tmp_path / "config.json").write_text(json.dumps(config))
    geometry = read_geometry(tmp_path, build.read_manifest(folder))
    assert geometry.kv_dtype is torch.uint8 and geometry.max_blocks == 74


def test_engine_that_tensorrt_cannot_load_is_refused_in_one_line(
    folder: Path, tmp_path: Path, checkpoint: Path
) -> None:
    broken = make_tree_engine(tmp_path / "engine", checkpoint)
    (broken / "rank0.engine").write_text("no engine\nat all")
    with pytest.raises(ConfigError, match="TensorRT cannot load the engine") as caught:
        build.load_paged(config_of(broken))
    assert "\n" not in str(caught.value)
