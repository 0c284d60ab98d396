"""`python -m benchmarks.cost_learning`: how close trees sized by learnt costs come to trees sized by the true ones.

Replays `auto` along known texts, with a target whose passes cost what a formula says, times a drifting speed, times
noise. No model runs and nothing is timed, so the figures depend only on the seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay import Deployment, Text, add_text_options, load_texts
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.cost_model import Batch, CostModel, CostModels, Curve, PassCosts
from orchestrator.core.drafting import Limits
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance, PassLoad
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.registry import select_method
from runtime.engine.profile import NUM_ROWS

#: Milliseconds of a pass by its rows; the first is about that of the demo target on two cores.
COSTS: dict[str, Callable[[float], float]] = {
    "0.6 + 0.14 a further row": lambda rows: 0.6 + 0.14 * (rows - 1),
    "flat (1 + 0.005 a row)": lambda rows: 1.0 + 0.005 * (rows - 1),
    "stairs (0.6 for 8 rows)": lambda rows: 1.0 + 0.6 * ((rows - 1) // 8),
    "mixture of experts": lambda rows: 0.3 + 0.7 * min(rows, 12) + 0.05 * max(rows - 12, 0),
}
#: Standard deviation of the logarithm of a cost measured at load.
MEASURED_NOISE = 0.05
#: Standard deviation of the logarithm of the speed, and the number of passes over which it drifts; standard deviation
#: of the logarithm of a pass's own noise; fraction of passes that are held up, and their mean delay; cost of a step
#: besides its pass.
DRIFT, DRIFT_PASSES, NOISE, HELD_UP, HELD_UP_MS, BESIDE_MS = 0.3, 100, 0.2, 0.02, 0.8, 0.05


class Known(StepCosts):
    """Costs that are given instead of learnt."""

    def __init__(self, clock: Callable[[], float], cost: Callable[[float], float]) -> None:
        super().__init__(clock)
        rows = np.arange(1.0, MAX_NODES + 2)
        costs = PassCosts(Curve(rows, np.array([cost(number) for number in rows.tolist()]), 0.0))
        self._known = CostModels(costs, Batch(others=0.0, rows=1.0, tokens=1.0, num_kv_tokens=0.0), single_s=0.0).at(0)

    @property
    def wants_plain(self) -> bool:
        """False, since plain steps need not be measured."""
        return False

    def cost_model(self, num_kv_tokens: int = 0) -> CostModel:
        """Return the given costs, which do not depend on the context."""
        return self._known


@dataclass
class Machine:
    """A target whose passes take the time that a formula gives, with drift and noise.

    Proposers take its milliseconds for seconds, which makes no difference: they use only ratios.
    """

    cost: Callable[[float], float]
    rng: np.random.Generator
    now_ms: float = 0.0
    true_ms: float = 0.0
    num_nodes: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    _speed: float = 0.0

    def clock(self) -> float:
        """Return the time; proposers use only differences."""
        return self.now_ms

    def step(self, ids: list[int], context: Context, tree: TokenTree) -> Acceptance:
        """Run a step along the text `ids`."""
        kept, num_rows = math.exp(-1 / DRIFT_PASSES), tree.num_nodes + 1
        self._speed = kept * self._speed + math.sqrt(1 - kept**2) * DRIFT * self.rng.normal()
        took_ms = self.cost(num_rows) * math.exp(self._speed + NOISE * self.rng.normal())
        took_ms += self.rng.exponential(HELD_UP_MS) if self.rng.random() < HELD_UP else 0.0
        path, token = accept_coupled(tree, [ids[len(context) + depth] for depth in tree.depths.tolist()])
        self.now_ms += took_ms
        self.true_ms += self.cost(num_rows) + BESIDE_MS
        self.num_nodes, self.num_steps = self.num_nodes + tree.num_nodes, self.num_steps + 1
        self.num_tokens += len(path) + 1
        load = PassLoad(num_rows, 1, float(num_rows), len(path) + 1.0)
        return Acceptance(path, token, forward_us=round(1e6 * took_ms), load=load)


def replayed(texts: Sequence[Text], deployment: Deployment, machine: Machine, costs: StepCosts) -> tuple[float, float]:
    """Return the tokens per millisecond by the true costs, and the mean nodes per step."""
    costs.drafts_in_bursts = True
    dependencies = ProposerDependencies(
        drafter_client=lambda name: None,  # type: ignore[arg-type, return-value]
        vocab_size=deployment.checkpoint.vocab_size,
        tables=deployment.tables,
        step_costs=costs,
        estimates=AcceptanceEstimates(),
    )
    for text in texts:
        proposer = select_method("auto", "", frozenset(), {}).proposer(dependencies)
        context, ids = Context(text.prompt_ids), [*text.prompt_ids, *text.output]
        limits = Limits(len(text.output), len(ids), MAX_NODES)
        while len(context) < len(ids):
            proposal = proposer.propose(context, Sampling(), limits.budget(context)).cut(limits.budget(context))
            acceptance = machine.step(ids, context, proposal.tree)
            context.commit(acceptance.tokens(proposal.tree))
            proposer.observe(proposal.tree, acceptance)
    return machine.num_tokens / machine.true_ms, machine.num_nodes / machine.num_steps


def measured(cost: Callable[[float], float], rng: np.random.Generator) -> PassCosts:
    """Return the costs as they would be measured at load, with noise."""
    seconds = [cost(rows) * math.exp(MEASURED_NOISE * rng.normal()) for rows in NUM_ROWS]
    return PassCosts(Curve.measured([*NUM_ROWS], seconds))


def cells(
    cost: Callable[[float], float], texts: Sequence[Text], deployment: Deployment, num_seeds: int
) -> Iterator[str]:
    """Yield the rate with the true costs, and the fractions of it that learnt costs reach; nodes in brackets."""
    machine = Machine(cost, np.random.default_rng(0))
    best, nodes = replayed(texts, deployment, machine, Known(machine.clock, cost))
    yield f"{best:.2f} ({nodes:.1f})"
    for is_measured in (False, True):
        found = []
        for seed in range(num_seeds):
            machine = Machine(cost, np.random.default_rng(seed))
            curve = measured(cost, np.random.default_rng(num_seeds + seed)) if is_measured else None
            found.append(replayed(texts, deployment, machine, StepCosts(machine.clock, curve)))
        rates, sizes = zip(*found, strict=True)
        yield f"{np.mean(rates) / best:.3f} ({np.mean(sizes):.1f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table: tokens per millisecond, and in brackets draft nodes per step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_text_options(parser, num_prompts=16)
    parser.add_argument("--seeds", type=int, default=4, help="runs of each cell (%(default)s)")
    options = parser.parse_args(arguments)
    deployment, texts = load_texts(options)
    order = np.random.default_rng(0).permutation(len(texts))
    texts = [texts[index] for index in order]
    print("| cost of a pass | true: tokens/ms (nodes) | learnt | measured at load, corrected |")
    print("|---|---:|---:|---:|")
    for name, cost in COSTS.items():
        print(f"| {name} | {' | '.join(cells(cost, texts, deployment, options.seeds))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
