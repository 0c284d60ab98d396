"""`python -m benchmarks.joint_growth`: what it gains to size the trees of all requests of a pass together.

Replays batches of `auto` along known texts, with a target whose passes cost what a formula says. The costs are learnt
as on the server: measured at load with noise, and corrected by passes with a drifting speed and noise. No model runs
and nothing is timed, so the figures depend only on the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.cost_learning import COSTS, DRIFT, DRIFT_PASSES, NOISE, measured
from benchmarks.replay import Deployment, Text, add_text_options, load_texts
from orchestrator.core.accept import accept_coupled
from orchestrator.core.context import Context
from orchestrator.core.cost_model import CostModel
from orchestrator.core.proposal import Budget
from orchestrator.core.step_costs import StepCosts
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import PassLoad
from orchestrator.drafting.candidates import CandidateSource, TableCandidates, TextCandidates
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.joint_growth import grow_jointly, joint_costs

#: Passes of a burst; the trees of the first one are each sized by itself.
BURST = 12
#: Maximum nodes of a tree in a pass of one request, and of several.
MAX_NODES_ALONE, MAX_NODES = 48, 32
#: Rows of the passes for which a GPU keeps graphs; a pass with fewer rows is as slow.
GRAPH_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72, 96, 128, 160, 192, 256, 288, 320, 384, 512)


def gpu_ms(rows: float) -> float:
    """Return milliseconds of an 8B model in bfloat16 on an H200, by roofline: 1 row 3.85, 64 rows 4.5, 256 rows 7.6."""
    padded = GRAPH_ROWS[place] if (place := bisect_left(GRAPH_ROWS, rows)) < len(GRAPH_ROWS) else rows
    return 3.85 + 0.65 / 63 * (min(padded, 64) - 1) + 3.1 / 192 * max(padded - 64, 0)


SURFACES: dict[str, Callable[[float], float]] = {
    **COSTS,
    "stairs (0.6 for 32 rows)": lambda rows: 1.0 + 0.6 * ((rows - 1) // 32),
    "8B on a GPU, graphs": gpu_ms,
}


class Request:
    """One request of `auto` along a known text, of which a part has been generated."""

    def __init__(self, text: Text, deployment: Deployment, estimates: AcceptanceEstimates, part: float = 0.0) -> None:
        self._ids = [*text.prompt_ids, *text.output]
        self.context = Context(text.prompt_ids)
        self.context.commit(text.output[: int(part * (len(text.output) - 1))])
        tables = [TableCandidates(deployment.tables)] if deployment.tables else []
        sources: list[CandidateSource] = [TextCandidates(), *tables]
        self.growth = Growth(sources, estimates)

    @property
    def num_left(self) -> int:
        """How many tokens are still to come."""
        return len(self._ids) - len(self.context)

    def step(self, tree: TokenTree) -> int:
        """Commit what a step with this tree accepts, and return how many tokens that is."""
        path, token = accept_coupled(tree, [self._ids[len(self.context) + depth] for depth in tree.depths.tolist()])
        tokens = [*(int(tree.tokens[node - 1]) for node in path), token]
        self.growth.learn(tokens)
        self.context.commit(tokens)
        return len(tokens)


def trees(requests: Sequence[Request], costs: CostModel, jointly: bool) -> list[TokenTree]:
    """Return the trees of a pass, sized together or each by itself."""
    count, shared = len(requests), costs.shared
    most = MAX_NODES_ALONE if count == 1 else MAX_NODES
    budgets = [Budget(most, request.num_left - 1) for request in requests]
    if not jointly or shared is None:
        pairs = zip(requests, budgets, strict=True)
        return [request.growth.grow(request.context, budget, costs).tree for request, budget in pairs]
    for request, budget in zip(requests, budgets, strict=True):
        request.growth.begin_tree(request.context, budget)
    growths = [request.growth for request in requests]
    sizes = grow_jointly(growths, [0.0] * count, joint_costs(shared.curve, 0.0, count, count, count, count * most))
    return [growth.sent(size).tree for growth, size in zip(growths, sizes, strict=True)]


def rate(
    texts: Sequence[Text],
    deployment: Deployment,
    cost: Callable[[float], float],
    count: int,
    jointly: bool,
    num_passes: int,
    seed: int,
) -> float:
    """Return the tokens per millisecond of a batch of `count` requests, by the true costs, after as many to warm up."""
    rng = np.random.default_rng(seed)
    step_costs = StepCosts(measured=measured(cost, np.random.default_rng(1000 + seed)))
    order = itertools.cycle(rng.permutation(len(texts)).tolist())
    estimates, speed, kept = AcceptanceEstimates(), 0.0, math.exp(-1 / DRIFT_PASSES)
    requests = [Request(texts[next(order)], deployment, estimates, rng.random()) for _ in range(count)]
    costs, num_tokens, spent_ms = step_costs.cost_model(), 0, 0.0
    for number in range(2 * num_passes):
        if number % BURST == 0:
            costs = step_costs.cost_model()
        assert costs
        drafted = trees(requests, costs, jointly and number % BURST > 0)
        num_rows = count + sum(tree.num_nodes for tree in drafted)
        new = sum(request.step(tree) for request, tree in zip(requests, drafted, strict=True))
        speed = kept * speed + math.sqrt(1 - kept**2) * DRIFT * rng.normal()
        load = PassLoad(num_rows, count, num_rows / count, new / count)
        step_costs.observe_native(1, count, 1, cost(num_rows) * math.exp(speed + NOISE * rng.normal()), load)
        for place, request in enumerate(requests):
            if not request.num_left:
                requests[place] = Request(texts[next(order)], deployment, estimates)
        if number >= num_passes:
            num_tokens, spent_ms = num_tokens + new, spent_ms + cost(num_rows)
    return num_tokens / spent_ms


def cells(
    options: argparse.Namespace, cost: Callable[[float], float], texts: Sequence[Text], deployment: Deployment
) -> Iterator[str]:
    """Yield for each number of requests how much faster trees that are sized together are."""
    for count in options.requests:
        ratios = []
        for seed in range(options.seeds):
            arguments = texts, deployment, cost, count
            alone, together = (rate(*arguments, each, options.steps // count, seed) for each in (False, True))
            ratios.append(together / alone)
        yield f"{np.mean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a Markdown table: tokens per second of trees sized together ÷ each by itself; the range over the seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 4, 16, 64), help="sizes of batches")
    parser.add_argument("--steps", type=int, default=2048, help="steps of all requests, after as many (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell (%(default)s)")
    add_text_options(parser, num_prompts=24)
    options = parser.parse_args(arguments)
    deployment, texts = load_texts(options)
    print(f"| cost of a pass | {' | '.join(map(str, options.requests))} |\n|---|{'---:|' * len(options.requests)}")
    for name, cost in SURFACES.items():
        print(f"| {name} | {' | '.join(cells(options, cost, texts, deployment))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
