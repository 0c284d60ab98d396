"""Heads and draft models that native code calls between the steps that it runs, against calls step by step."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from native import library
from native.compiling import Unbuilt
from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DrafterUse, DraftRequest
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.methods import METHODS as METHODS_BY_NAME
from orchestrator.core.proposal import NativeDrafts, Proposer, Step
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import HiddenStates, StepOptions
from orchestrator.drafting.drafter_clients import LocalDrafterClient
from orchestrator.drafting.registry import select_method
from orchestrator.server.text import FinishReason, StopRule
from runtime.engine import runs
from runtime.engine.draft import DraftEngine
from runtime.engine.local_drafter import LocalDrafter
from runtime.engine.target import TargetEngine
from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.eagle import EagleEngine
from runtime.models.heads.engines.medusa import MedusaEngine
from runtime.models.heads.engines.redrafter import RedrafterEngine
from runtime.models.heads.sharpness import Sharpness
from runtime.models.native.decoding import Decoding
from tests.support import decode as support
from tests.support import published_heads
from tests.support.clients import until
from tests.support.engines import LIMIT_S, make_paged
from tests.support.heads import NUM_LAYERS, load, native_or_skip
from tests.support.tiny_models import TINY, VOCAB_SIZE, make_tiny_target
from tests.unit.runtime.engine import test_runs
from tests.unit.runtime.engine.test_runs import LIMITS, MAX_TOKENS, Served
from tests.unit.runtime.engine.test_runs import both as run_and_loop

SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16, "num_hidden_layers": NUM_LAYERS}
WIDE = TINY | {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
METHODS = {
    "draft_model": '"draft_len": 4, "min_prob": 0',
    "draft_model sure": '"draft_len": 6, "min_prob": 0.3',
    "medusa": '"max_nodes": 20, "min_prob": 0',
    "medusa choices": '"choices": [[0], [0, 0], [1], [0, 1], [2], [1, 0], [0, 0, 0]], "max_nodes": 6, "min_prob": 0',
    "eagle": '"max_nodes": 12, "min_prob": 0',
    "eagle2": '"top_k": 4, "depth": 3, "max_nodes": 14, "min_prob": 0',
    "eagle3": '"top_k": 24, "depth": 2, "max_nodes": 31, "min_prob": 0',
    "redrafter": '"beams": 4, "beam_len": 3, "min_prob": 0',
    "prompt_lookup+eagle2": '"max_nodes": 13, "eagle2": {"top_k": 3, "depth": 3, "min_prob": 0}',
    "suffix+draft_model": '"max_nodes": 9, "draft_model": {"draft_len": 9, "min_prob": 0}, "suffix": {"factor": 4}',
}
SAMPLINGS = (Sampling(), Sampling(0.8, top_p=0.9, top_k=20, seed=6))


def prediction_of(rng: Random, output: list[int], vocab_size: int) -> tuple[int, ...]:
    """The output with tokens replaced, left out and put in, and pieces of it moved."""
    prediction, damage = list[int](), rng.choice([0.0, 0.02, 0.1, 0.4])
    for token in output:
        choice = rng.random() / damage if damage else 9
        prediction += [token] if choice > 1 else [rng.randrange(vocab_size)] * (choice < 0.6) + [token] * (choice < 0.3)
    start, end = sorted(rng.randrange(len(output)) for _ in range(2))
    return tuple(prediction[start:end] + prediction if rng.random() < 0.5 else prediction[start:])


def drafters_of(folder: Path, target: Path) -> dict[str, LocalDrafter]:
    """Return native drafters of a target: random heads, and the target itself as its draft model."""
    written = {
        "medusa": published_heads.write_medusa(folder / "medusa", 64, VOCAB_SIZE, num_heads=4),
        "eagle": published_heads.write_eagle(folder / "eagle", WIDE),
        "eagle3": published_heads.write_eagle3(folder / "eagle3", WIDE, draft_vocab_size=VOCAB_SIZE),
        "redrafter": published_heads.write_redrafter(folder / "redrafter", 64, VOCAB_SIZE),
    }
    heads = {name: load(name, path, target) for name, path in written.items()}
    natives = {name: native_or_skip(head.float()) for name, head in heads.items()}
    engines: dict[str, HeadEngine | DraftEngine] = {
        "draft": DraftEngine(make_paged(target, dtype="float32", kernels="native"), Sharpness(0.5)),
        "medusa": MedusaEngine(heads["medusa"], natives["medusa"]),
        "eagle": EagleEngine(heads["eagle"], memory_mb=1, block_tokens=4, native=natives["eagle"]),
        "eagle3": EagleEngine(heads["eagle3"], memory_mb=1, block_tokens=4, native=natives["eagle3"]),
        "redrafter": RedrafterEngine(heads["redrafter"], natives["redrafter"]),
    }
    return {name: LocalDrafter(engine) for name, engine in engines.items()}


class Drafted(Served):
    """A native target with drafters beside it. burst_tokens: tokens of each step that native code drafted and ran."""

    def __init__(self, target: Path, folder: Path) -> None:
        states = HiddenStates.LAST | HiddenStates.LAYERS
        super().__init__(target, dtype="float32", kernels="native", features=states)
        self.drafters = drafters_of(folder, target)
        self.burst_tokens: list[int] = []
        self.sizes: set[int] = set()
        self.watch_bursts(self._note)

    def _note(self, drafts: NativeDrafts, steps: list[Step]) -> None:
        if any(isinstance(each.owner, DrafterUse) for each in drafts.members_or_self):
            self.burst_tokens += [step.acceptance.num_tokens for step in steps[1:]]
            self.sizes |= {step.proposal.tree.num_nodes for step in steps[1:]}

    def proposer(self, method: str, config: str, prediction: tuple[int, ...]) -> Proposer:
        dependencies = support.dependencies(
            vocab_size=VOCAB_SIZE,
            max_nodes=LIMITS.max_nodes,
            prediction=prediction,
            drafter_client=lambda name: LocalDrafterClient(name, self.drafters[name], "", LIMIT_S),
        )
        return select_method(method, config, frozenset(self.drafters), {}).proposer(dependencies)

    def tell(self, folder: Path, number: int, method: str, sampling: Sampling) -> Any:
        """Return the text of a run and its figures."""
        stop = StopRule(MAX_TOKENS)
        return self.generate_text(folder, number, sampling, run_of(method, stop), stop)


def config_of(method: str) -> tuple[str, str]:
    return method.split()[0], f"{{{METHODS[method]}}}"


def run_of(method: str, stop: StopRule) -> RunOptions:
    if method == "none":
        return RunOptions("none", "{}", LIMITS, stop.min_tokens, tuple(stop.ids))
    name, config = config_of(method)
    return RunOptions(name, config, LIMITS, stop.min_tokens, tuple(stop.ids))


def both(drafted: Drafted, folder: Path, method: str, sampling: Sampling, stop: StopRule) -> tuple[Any, Any]:
    return run_and_loop(drafted, folder, config_of(method), sampling, stop, StepOptions(), run_of(method, stop))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        library.load()
    except Unbuilt as error:
        pytest.skip(str(error))
    return make_tiny_target(tmp_path_factory.mktemp("target"), **SIZES, initializer_range=0.2)


@pytest.fixture(scope="module")
def drafted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise bursts have only a few steps on a busy machine, and none of these may accept a draft.
        patch.setattr(runs, "HOLD_S", 2.0)
        patch.setattr(runs, "MAX_HOLD_S", 2.0)
        made = Drafted(target, tmp_path_factory.mktemp("heads"))
        yield made
        made.runs.close()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("greedy", "sampled"))
@pytest.mark.parametrize("method", METHODS)
def test_native_steps_have_the_trees_and_the_text_of_single_steps(
    drafted: Drafted, target: Path, method: str, sampling: Sampling
) -> None:
    drafted.burst_tokens.clear(), drafted.sizes.clear()
    free, by_step = both(drafted, target, method, sampling, StopRule(MAX_TOKENS))
    assert free == by_step
    assert max(drafted.burst_tokens) > 1 and max(drafted.sizes) > 1, "no draft was accepted in native steps"
    assert free[0].ids == drafted.tell(target, 50, "none", sampling)[0].ids
    stop = StopRule(MAX_TOKENS, frozenset({free[0].ids[-3]}))
    in_run, by_step = both(drafted, target, method, sampling, stop)
    assert in_run == by_step and by_step[1]["finish"] is FinishReason.STOP


#: The members of random unions, with their parameters. A share of the nodes is smaller than what most of them want.
MEMBERS = {
    "predicted": {"draft_len": 5, "max_ngram": 3},
    "prompt_lookup": {"branches": 2, "draft_len": 6},
    "suffix": {"factor": 4.0, "min_prob": 0.0},
    "draft_model": {"draft_len": 9, "min_prob": 0},
    "medusa": {"choices": [[0], [0, 0], [1], [0, 1], [2], [1, 0], [0, 0, 0]], "min_prob": 0},
    "eagle": {"min_prob": 0},
    "eagle2": {"top_k": 4, "depth": 3, "min_prob": 0},
    "redrafter": {"beams": 3, "beam_len": 3, "min_prob": 0},
}


def random_union(random: Random) -> tuple[str, str]:
    """Return a union of one or two methods that draft from tokens and at most one drafter, in any order."""
    names = random.sample([*MEMBERS][:3], random.choice((1, 2))) + [random.choice(["draft_model", *[*MEMBERS][3:]])]
    random.shuffle(names)
    caps = {name: {"max_nodes": random.randint(2, 9)} for name in names if random.random() < 0.3 and name != "medusa"}
    members = {name: MEMBERS[name] | caps.get(name, {}) for name in names}
    return "+".join(names), json.dumps({"max_nodes": random.randint(1, 24)} | members)


@pytest.fixture(scope="module")
def other_draft_model(tmp_path_factory: pytest.TempPathFactory) -> LocalDrafter:
    """Return a draft model whose chains the target seldom follows, so that other members' paths are accepted."""
    folder = make_tiny_target(tmp_path_factory.mktemp("other"), **SIZES, seed=1, initializer_range=0.2)
    return LocalDrafter(DraftEngine(make_paged(folder, dtype="float32", kernels="native"), Sharpness(0.5)))


@pytest.mark.parametrize("seed", range(40))
def test_native_code_merges_the_trees_of_random_unions_as_python_does(
    drafted: Drafted, other_draft_model: LocalDrafter, target: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some bursts end after a few steps: they are resumed, or the members propose in Python in between."""
    random, stop = Random(seed), StopRule(MAX_TOKENS)
    method, config = random_union(random)
    monkeypatch.setattr(test_runs, "PROMPT", [random.randrange(VOCAB_SIZE) for _ in range(random.randint(2, 5))] * 3)
    monkeypatch.setattr("runtime.engine.run.MAX_AHEAD", random.choice((3, 64)))
    burst, max_steps = TargetEngine._burst, random.choice((2, 64))

    def short(*arguments: Any) -> Decoding | None:
        decoding = burst(*arguments)
        return decoding and decoding._replace(num_steps=min(decoding.num_steps, max_steps))

    monkeypatch.setattr(TargetEngine, "_burst", short)
    if random.random() < 0.5:
        monkeypatch.setitem(drafted.drafters, "draft", other_draft_model)
    sampling = random.choice(SAMPLINGS)
    prediction = prediction_of(random, drafted.tell(target, 60, "none", sampling)[0].ids, VOCAB_SIZE)
    run = RunOptions(method, config, LIMITS, stop.min_tokens, tuple(stop.ids), prediction)
    drafted.burst_tokens.clear()
    in_run, by_step = run_and_loop(drafted, target, (method, config), sampling, stop, StepOptions(), run)
    assert in_run == by_step
    assert drafted.burst_tokens, "no step ran in native code"


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.8, seed=3, rule=Rule.REJECTION), Sampling(repetition_penalty=1.2)],
    ids=("rejection", "penalty"),
)
@pytest.mark.parametrize("method", ["eagle2", "draft_model"])
def test_steps_that_python_decides_still_get_drafts(
    drafted: Drafted, target: Path, method: str, sampling: Sampling
) -> None:
    drafted.burst_tokens.clear()
    in_run, by_step = both(drafted, target, method, sampling, StopRule(MAX_TOKENS))
    assert in_run[0] == by_step[0] and in_run[1]["sources"] == by_step[1]["sources"] and not drafted.burst_tokens
    assert by_step[1]["sources"][method]["num_drafted"] > 0


@pytest.mark.parametrize("method", ["eagle2", "draft_model", "medusa"])
def test_a_drafter_that_has_lost_a_sequence_reads_it_again_and_drafts_on(
    drafted: Drafted, target: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second burst of steps finds a drafter that does not know the sequence."""
    plain = drafted.tell(target, 60, "none", Sampling())[0].ids
    drafter = drafted.drafters[method_drafter(method)]
    continued, bursts = drafter.engine.continued, list[bool]()

    def lost(request: Any, context: Context, num_ahead: int) -> Any:
        bursts.append(len(bursts) % 2 == 1)
        return continued(request, context, num_ahead) if bursts[-1] else None

    monkeypatch.setattr(drafter.engine, "continued", lost)
    text, figures = drafted.tell(target, 61, method, Sampling())
    assert text.ids == plain and len(bursts) > 1
    # The first step has no hidden states, and the last one no token to draft; else each step without a draft would be
    # followed by one with a draft.
    num_drafted = sum(bool(step["node_ids"]) for step in json.loads(figures["trace"])["steps"])
    assert 2 * (num_drafted + 2) >= figures["num_steps"]


def test_a_call_from_another_thread_ends_the_burst_that_has_the_drafter(drafted: Drafted, target: Path) -> None:
    drafter, progress = drafted.drafters["eagle"], drafted.engine._passes.progress  # type: ignore[attr-defined]
    context = Context([1, 2, 3])
    request = DraftRequest(delta_of(context, 0, 80, ""), Sampling(), 4, 4, deadline_ms=int(1000 * LIMIT_S))
    with drafter.lend(progress):
        caller = threading.Thread(target=lambda: drafter.draft(request), daemon=True)
        caller.start()
        until(lambda: progress.num_waiting.value == 1, "the call")
    caller.join(LIMIT_S)
    assert not caller.is_alive() and progress.num_waiting.value == 0
    drafter.release(80)


def method_drafter(method: str) -> str:
    return METHODS_BY_NAME[method].drafter
