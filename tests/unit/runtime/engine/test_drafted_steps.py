"""Steps with drafts that native code runs several at a time, against a loop without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from orchestrator.core.cost_model import CostModel
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.proposal import NativeDrafts, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import StepOptions
from orchestrator.drafting import native_methods
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.registry import select_method
from orchestrator.server.text import FinishReason, StopRule
from runtime.engine import runs
from tests.support import decode as support
from tests.support.cost_models import cost_model_of
from tests.support.tiny_models import VOCAB_SIZE
from tests.unit.orchestrator.drafting.test_native_methods import prediction_of
from tests.unit.runtime.engine.test_runs import LIMITS, MAX_TOKENS, Served, both, run_of

#: The name that the trace has of the sources of drafts, by the method and its parameters.
METHODS = {
    ("auto", "{}"): "suffix",
    ("auto", '{"tree": false, "draft_len": 3}'): "suffix",
    ("prompt_lookup", "{}"): "prompt_lookup",
    ("prompt_lookup", '{"branches": 3, "draft_len": 4, "length": "grown", "match": "frequent"}'): "prompt_lookup",
    ("suffix", "{}"): "suffix.text",
    ("suffix", '{"tree": false, "draft_len": 3}'): "suffix.text",
    ("prompt_lookup+suffix", '{"max_nodes": 7, "prompt_lookup": {"branches": 2}}'): "prompt_lookup+suffix.text",
}
SAMPLINGS = (Sampling(), Sampling(0.3, seed=5), Sampling(0.8, top_p=0.9, top_k=20, seed=6))


class FreeRows(StepCosts):
    """Costs by which every draft pays."""

    def cost_model(self, num_kv_tokens: int = 0) -> CostModel:
        """Return a pass that costs the same whatever its rows."""
        return cost_model_of(np.ones(MAX_NODES + 1))

    @property
    def wants_plain(self) -> bool:
        """Plain steps are never measured."""
        return False


class Drafted(Served):
    """A native target whose runs draft by `auto` as if rows cost nothing. burst_tokens: those of each step but the first of a burst."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, dtype="float32", kernels="native", **options)
        self.burst_tokens: list[int] = []
        self.watch_bursts(self._note)

    def _note(self, drafts: NativeDrafts, steps: list[Step]) -> None:
        self.burst_tokens += [step.acceptance.num_tokens for step in steps[1:]]

    def proposer(self, method: str, config: str, prediction: tuple[int, ...]) -> Proposer:
        dependencies = support.dependencies(
            vocab_size=VOCAB_SIZE,
            max_nodes=LIMITS.max_nodes,
            prediction=prediction,
            estimates=AcceptanceEstimates(),
            step_costs=FreeRows(lambda: 0.0),
        )
        return select_method(method, config, frozenset(), {}).proposer(dependencies)

    def tell(self, folder: Path, number: int, method: str, sampling: Sampling, stop: StopRule) -> Any:
        """Return the text of a run and its figures."""
        return self.generate_text(folder, number, sampling, run_of(method, "{}", stop), stop)


@pytest.fixture(scope="module")
def folder(native_folder: Path) -> Path:
    return native_folder


@pytest.fixture(scope="module")
def drafted(folder: Path) -> Iterator[Drafted]:
    made = Drafted(folder)
    yield made
    made.runs.close()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("greedy", "cool", "sampled"))
@pytest.mark.parametrize(
    ("method", "source"),
    METHODS.items(),
    ids=("auto", "auto chains", "lookup", "branches", "suffix", "suffix chains", "union"),
)
def test_steps_run_together_have_the_trees_and_the_text_of_single_steps(
    drafted: Drafted, folder: Path, sampling: Sampling, method: tuple[str, str], source: str
) -> None:
    drafted.burst_tokens.clear()
    free, by_step = both(drafted, folder, method, sampling, StopRule(MAX_TOKENS), StepOptions())
    assert free == by_step and f'"{source}"' in free[1]["trace"]
    assert max(drafted.burst_tokens) > 1
    stop = StopRule(MAX_TOKENS, frozenset({free[0].ids[-3]}))
    in_run, by_step = both(drafted, folder, method, sampling, stop, StepOptions())
    assert in_run == by_step and by_step[1]["finish"] is FinishReason.STOP


@pytest.mark.parametrize("config", ['{"draft_len": 4}', '{"max_ngram": 1}'])
@pytest.mark.parametrize("method", ("predicted", "predicted+suffix", "prompt_lookup+predicted"))
@pytest.mark.parametrize("seed", range(6))
def test_steps_that_follow_a_prediction_have_the_trees_of_the_reference(
    drafted: Drafted, folder: Path, method: str, config: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOLD_S", "MAX_HOLD_S"):
        monkeypatch.setattr(runs, name, 2.0)  # otherwise bursts have only a few steps on a busy machine
    # Three steps ahead of the caller, bursts and single steps alternate.
    monkeypatch.setattr("runtime.engine.run.MAX_AHEAD", 3 if seed % 2 else 64)
    sampling, stop = SAMPLINGS[seed % 3], StopRule(MAX_TOKENS)
    text = drafted.tell(folder, 400, "none", sampling, stop)[0].ids
    prediction = prediction_of(Random(seed), text, VOCAB_SIZE)
    config = config if method == "predicted" else f'{{"predicted": {config}}}'
    run = RunOptions(method, config, LIMITS, stop.min_tokens, (), prediction)
    drafted.burst_tokens.clear()
    in_run, by_step = both(drafted, folder, (method, config), sampling, stop, StepOptions(), run)
    assert drafted.burst_tokens, "no steps ran in native code"
    monkeypatch.setattr(native_methods, "native_predicted", lambda *_: None)
    assert in_run == by_step == drafted.generate_text(folder, 401, sampling, run, stop)
    assert in_run[0].ids == text


def test_many_runs_at_once_with_drafts_and_without_tell_what_each_tells_alone(drafted: Drafted, folder: Path) -> None:
    samplings = [Sampling(seed % 3 / 3, seed=seed) for seed in range(16)]
    methods = [("none", "auto", "prompt_lookup", "suffix", "auto", "jacobi")[seed % 6] for seed in range(16)]

    def tell(seed: int) -> Any:
        return drafted.tell(folder, 100 + seed, methods[seed], samplings[seed], StopRule(MAX_TOKENS))

    alone = [tell(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(tell, range(16)))
    for method, one, same in zip(methods, alone, together, strict=True):
        # The trees of `auto` are sized with those of the requests that share the pass.
        assert one[:1] == same[:1] if method == "auto" else one == same
    for seed in range(16):
        assert drafted.tell(folder, 200, "none", samplings[seed], StopRule(MAX_TOKENS))[0] == alone[seed][0]


def test_where_a_pass_has_no_room_for_whole_drafts_steps_run_one_by_one(
    drafted: Drafted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` sizes its trees itself, and may be cut; the drafts of other methods are the same under any load."""
    for method, max_rows, is_burst in (("suffix", 33, True), ("suffix", 32, False), ("auto", 8, True)):
        monkeypatch.setattr("runtime.models.native.decoding.MAX_PASS_ROWS", max_rows)
        drafted.burst_tokens.clear()
        drafted.tell(folder, 300, method, Sampling(), StopRule(MAX_TOKENS))
        assert bool(drafted.burst_tokens) == is_burst


def test_drafts_end_where_the_pool_has_no_more_blocks(folder: Path) -> None:
    """Four sequences share a pool that holds the tokens of three and a half, so that they are preempted, too."""
    small = Drafted(folder, memory_mb=1)
    try:
        pool = small.engine._engine.sequences.pool  # type: ignore[attr-defined]
        pool.allocate(pool.num_free + pool.num_cached - 7 * MAX_TOKENS // 8, None)
        samplings = [Sampling(0.2, seed=seed) for seed in range(4)]

        def tell(seed: int) -> Any:
            return small.tell(folder, seed, "auto", samplings[seed], StopRule(MAX_TOKENS))[0]

        with ThreadPoolExecutor(4) as threads:
            together = list(threads.map(tell, range(4)))
        assert together == [tell(seed) for seed in range(4)]
    finally:
        small.runs.close()
