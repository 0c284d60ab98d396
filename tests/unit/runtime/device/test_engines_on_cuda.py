"""The torch engines on a stand-in for a CUDA device: the texts and drafts of the CPU, and a known number of waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.methods import DRAFTERS
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, HeadInput, HiddenStates, StepOptions
from runtime.engine import torch_engine
from runtime.engine.build_engines import no_caller
from runtime.engine.kv import batch
from runtime.engine.target import TargetEngine
from runtime.models import causal_lm
from runtime.models.heads.build_heads import load_engine
from tests.support.cuda_standin import cuda_standin
from tests.support.device_tensors import Traffic
from tests.support.engine_runs import Texts, branching, drafts_of
from tests.support.engines import EngineTarget
from tests.support.heads import make_head, make_target
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

RNG = np.random.default_rng(3)
HEADS = tuple(name for name in DRAFTERS if name != "draft")
OPTIONS = LogitsOptions(bias=((3, 1.0), (5, -1.0)), bad_words=((4,), (7, 8)), end_ids=(0,))
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.9, seed=4),
    "top-p": Sampling(0.8, top_p=0.9, seed=5),
    "top-k and min-p": Sampling(1.1, top_k=9, min_p=0.02, seed=6),
    "typical-p": Sampling(0.9, typical_p=0.8, seed=7),
    "penalties": Sampling(0.9, 0, 0.9, 0.0, 1.0, 1.2, 0.3, 0.2, 4, seed=3, logits_options=OPTIONS),
    "allowed": Sampling(0.7, seed=2, logits_options=LogitsOptions(allowed=tuple(range(30)))),
    "rejection": Sampling(0.9, top_p=0.9, seed=4, rule=Rule.REJECTION),
    "typical": Sampling(0.9, seed=4, rule=Rule.TYPICAL),
}
PROMPTS = [RNG.integers(1, VOCAB_SIZE, length).tolist() for length in (9, 70, 30, 12, 3, 17, 8, 20, 33)]
ALL = StepOptions(True, True, 0, 3, HiddenStates.LAST | HiddenStates.LAYERS, num_node_top=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model and a head of each kind."""
    folder = tmp_path_factory.mktemp("deployment")
    make_target(folder / "target", initializer_range=0.2)
    make_tiny_target(folder / "draft", seed=3, initializer_range=0.2)
    for kind in HEADS:
        make_head(kind, folder / kind)
    return folder


def configuration(root: Path, device: str, dtype: str = "float64", **changes: Any) -> ServingConfig:
    models = {name: str(root / name) for name in ("target", *DRAFTERS)}
    sizes = {"kv_memory_mb": 4, "block_tokens": 4, "max_pass_tokens": 40} | changes
    return ServingConfig(device=device, dtype=dtype, kernels="torch", **models, **sizes)


@contextmanager
def machine(device: str) -> Iterator[Traffic]:
    with nullcontext(Traffic()) if device == "cpu" else cuda_standin(num_devices=2) as traffic:
        yield traffic


def target_on(config: ServingConfig) -> TargetEngine:
    return TargetEngine(torch_engine._load(config.target, config, torch_engine.hidden_states_of(config)))


def comparable(answer: Acceptance) -> tuple[Any, ...]:
    ids = [each.tolist() for each in (answer.target_tokens, answer.top_ids, answer.node_top_ids) if each is not None]
    return answer.path, answer.next_token, ids


def texts_on(root: Path, device: str, dtype: str = "float64", truth: list[list[int]] | None = None) -> Any:
    """Return what a target answers to a prompt and two steps of every sampling, and the texts."""
    with machine(device):
        texts = Texts(target_on(configuration(root, device, dtype)), PROMPTS, list(SAMPLINGS.values()), ALL)
        answers = []
        for _ in range(3):
            trees = [
                branching(context, truth[place], VOCAB_SIZE) if truth else TokenTree.bare()
                for place, context in enumerate(texts.contexts)
            ]
            answers.append(texts.step(trees))
        return answers, [context.ids for context in texts.contexts]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_plain_steps_and_trees_give_the_text_of_the_cpu(root: Path, device: str) -> None:
    _, truth = texts_on(root, "cpu")
    for drafted in (None, truth) if device == "cuda" else (truth,):
        expected, text = texts_on(root, "cpu", truth=drafted)
        found, same = texts_on(root, device, truth=drafted)
        assert same == text
        for own, other in zip(sum(expected, []), sum(found, []), strict=True):
            assert comparable(own) == comparable(other)
            for name in ("logprobs", "top_logprobs", "features"):
                np.testing.assert_allclose(getattr(other, name), getattr(own, name), rtol=0, atol=1e-5)
    paths = [answer.path for answers in found for answer in answers]
    assert any(path and path != tuple(range(1, len(path) + 1)) for path in paths), "no accepted row had to be moved"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_arithmetic_gives_the_text_of_the_cpu_with_the_same_groups(
    root: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, too, segments attend in groups and products are torch's own: so the same operations round alike."""
    monkeypatch.setattr(batch, "joins", lambda device: True)
    monkeypatch.setattr(causal_lm, "pack_linears", lambda *_: None)
    _, truth = texts_on(root, "cpu", dtype)
    assert texts_on(root, "cpu", dtype, truth)[1] == texts_on(root, "cuda", dtype, truth)[1]


def test_preempted_sequences_give_the_text_of_the_cpu(root: Path) -> None:
    """Between two steps all lose their blocks; without shared prefixes they compute everything again, elsewhere."""

    def run(device: str) -> list[list[int]]:
        with machine(device):
            engine = target_on(configuration(root, device, prefix_sharing=False))
            texts = Texts(engine, PROMPTS[:3], [SAMPLINGS["sampled"]] * 3, StepOptions())
            for _ in range(3):
                texts.step([TokenTree.bare()] * 3)
                for sequence in list(engine.sequences.holders()):
                    sequence.preempt()
            return [context.ids for context in texts.contexts]

    assert run("cuda") == run("cpu")


def test_a_target_on_its_own_thread_is_warm_and_gives_the_text_of_the_cpu(root: Path) -> None:
    """As a deployment begins: with measured passes, a warm-up, and steps from another thread."""

    def run(device: str) -> list[int]:
        with machine(device), mock.patch("runtime.engine.profile.LIMIT_S", 0.2):
            thread, _ = torch_engine.build_target(configuration(root, device), no_caller)
            context, target = Context(PROMPTS[0]), EngineTarget(thread, 5)
            try:
                for _ in range(4):
                    step = target.step(context, TokenTree.bare(), SAMPLINGS["top-p"], StepOptions())
                    context.commit(step.tokens(TokenTree.bare()))
            finally:
                thread.close()
            return context.ids

    assert run("cuda") == run("cpu")


DRAFT_SAMPLINGS = [Sampling(), SAMPLINGS["sampled"], SAMPLINGS["rejection"], Sampling(0.9, seed=1, rule=Rule.BLOCK)]
SHAPES = {"dynamic": {"width": 2}, "static": {"choices": tree_of_choices([[0, 0], [1], [0, 1]])}}


#: Levels that are computed; those of a dynamic tree may be cut from its draft again.
LEVELS = {"dynamic": 4, "static": 2}


def drafts_on(root: Path, device: str, dtype: str, name: str, **shape: Any) -> tuple[Any, int, int]:
    """Return a drafter's drafts of several requests, the waits of their second call, and its deepest tree."""
    is_sampled = shape.get("draws", False)
    samplings = [each for each in DRAFT_SAMPLINGS if not is_sampled or each.rule is not Rule.COUPLED]
    with machine(device) as traffic:
        config = configuration(root, device, dtype)
        engine = torch_engine.load_draft(config) if name == "draft" else load_engine(name, config)[1]
        contexts = [Context(prompt) for prompt in PROMPTS[: len(samplings)]]
        width = getattr(engine, "feature_width", 0)
        states = [np.random.default_rng(7).normal(0, 1, (len(each) - 1, width)).astype(np.float32) for each in contexts]
        heads = [HeadInput(own if width else None, **shape) for own in states]
        drafts_of(engine, contexts, samplings, heads)
        with traffic.counted():
            drafted = drafts_of(engine, contexts, samplings, heads)
            num_waits = len(traffic.waits)
    found = [
        (each.tree.tokens.tolist(), each.tree.parents.tolist(), [(q.ids.tolist(), q.probs.tolist()) for q in each.q])
        for each in drafted
    ]
    return found, num_waits, max(int(each.tree.depths.max()) for each in drafted)


@pytest.mark.parametrize("draws", [False, True], ids=["ranked", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_what_it_does_on_the_cpu_and_waits_once_a_level(
    root: Path, kind: str, shape: str, draws: bool
) -> None:
    options = SHAPES[shape] | {"draws": draws}
    found, num_waits, depth = drafts_on(root, "cuda:1", "float64", kind, **options)
    assert found == drafts_on(root, "cpu", "float64", kind, **options)[0]
    assert num_waits == LEVELS[shape] and depth > 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_in_bfloat16_runs(root: Path, name: str) -> None:
    found, _, depth = drafts_on(root, "cuda", "bfloat16", name, **({} if name == "draft" else SHAPES["dynamic"]))
    assert found and depth > 1


@pytest.mark.parametrize(("min_prob", "waits_a_pass"), [(0.0, 2), (1e-9, 3)])
def test_the_draft_model_drafts_what_it_does_on_the_cpu(root: Path, min_prob: float, waits_a_pass: int) -> None:
    """A pass for each token: one wait for the tokens of `coupled`, one for the q of other rules, one for scores."""
    found, num_waits, depth = drafts_on(root, "cuda", "float64", "draft", min_prob=min_prob)
    assert found == drafts_on(root, "cpu", "float64", "draft", min_prob=min_prob)[0]
    assert num_waits == waits_a_pass * depth


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize(
    ("sampling", "options", "waits"),
    [
        ("greedy", {}, ["tokens"]),
        ("sampled", {}, ["tokens"]),
        ("top-p", {}, ["tokens"]),
        ("top-k and min-p", {}, ["tokens"]),
        ("penalties", {}, ["tokens"]),
        ("allowed", {}, ["tokens"]),
        ("greedy", {"features_from": 0, "hidden_states": HiddenStates.LAST}, ["tokens", "states"]),
    ],
)
def test_a_step_waits_for_its_tokens_only(
    root: Path, number: int, has_tree: bool, sampling: str, options: dict[str, Any], waits: list[str]
) -> None:
    """One wait brings the tokens, one the hidden states; the forward pass is timed without one."""
    with machine("cuda") as traffic:
        engine = target_on(configuration(root, "cuda", block_tokens=16, max_pass_tokens=400))
        samplings = [SAMPLINGS[sampling]] * number
        texts = Texts(engine, PROMPTS[:number], samplings, StepOptions(**options))
        texts.step([TokenTree.bare()] * number)
        tree = TokenTree.from_paths([[1, 2], [3]]) if has_tree else TokenTree.bare()
        with traffic.counted():
            texts.step([tree] * number)
            assert len(traffic.waits) == len(waits), traffic.waits


@pytest.mark.parametrize("draws", [False, True], ids=["ranked", "sampled"])
def test_the_draft_model_s_trees_are_those_of_the_cpu_with_a_wait_for_each_level(root: Path, draws: bool) -> None:
    options = SHAPES["dynamic"] | {"draws": draws}
    found, num_waits, depth = drafts_on(root, "cuda:1", "float64", "draft", **options)
    assert found == drafts_on(root, "cpu", "float64", "draft", **options)[0]
    assert num_waits == LEVELS["dynamic"] and depth > 1
